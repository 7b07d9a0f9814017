// A card of the page for classifiers: sentences, the prediction of every exit, and the exit that the rule chooses.
import { at, made } from "./dom.js";
import { digits, number } from "./numbers.js";

const APPEAR_STEP = 60; // milliseconds between the appearance of two exits
const SAME = 1e-6; // two float32 numbers this close are the same probability

export class Card {
  constructor(name, page) {
    this.page = page;
    this.element = at("#card").content.cloneNode(true).firstElementChild;
    const count = page.model.about.texts;
    this.fields = Array.from({ length: count }, () => made("textarea", { rows: 2 }));
    const names = count === 1 ? [`${name} sentence`] : [`${name} pair, first sentence`, `${name} pair, second sentence`];
    const form = at("form", this.element);
    form.append(...this.fields.map((field, each) => made("label", {}, names[each], field)), made("button", {}, "Classify"));
    form.onsubmit = (event) => (event.preventDefault(), this.classify());
    form.addEventListener("focusin", () => (page.used = this));
    for (const field of this.fields) field.onkeydown = (event) => this.key(event);
  }

  key(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.classify();
  }

  fill(texts) {
    this.fields.forEach((field, index) => (field.value = texts[index] ?? ""));
    if (texts.length) this.classify();
  }

  show(...words) {
    at(".verdict", this.element).classList.remove("failed");
    at(".verdict", this.element).replaceChildren(...words);
  }

  fail(error) {
    this.show(error.message ?? String(error));
    at(".verdict", this.element).classList.add("failed");
    at(".exits", this.element).replaceChildren();
  }

  /** Run the texts through all layers, then with the rule. */
  async classify() {
    const texts = this.fields.map((field) => field.value);
    const request = (this.request = {});
    this.input = null;
    if (texts.some((text) => !text.trim())) return this.fail("Write a sentence first.");
    this.show("Running…");
    try {
      const { model, settings } = this.page;
      const whole = await model.time(texts, settings, [model.about.exits.length - 1]);
      if (request !== this.request) return; // a newer request has started
      this.input = { texts, whole };
      await this.decide();
    } catch (error) {
      if (request === this.request) this.fail(error);
    }
  }

  /** Show the exit that the rule chooses, and the time. */
  async decide() {
    const { model, settings } = this.page;
    const input = this.input;
    if (!input) return;
    try {
      const answer = await model.decide(input.texts, settings);
      const exits = await model.exits(input.texts, settings);
      const milliseconds = await model.time(input.texts, settings);
      if (input !== this.input || settings !== this.page.settings) return; // a newer request has started
      const end = model.about.exits.at(-1);
      const confidence = answer.confidence === undefined ? "" : ` (${(100 * answer.confidence).toFixed(1)}% confident)`;
      const label = typeof answer.label === "number" ? answer.label.toFixed(3) : answer.label;
      const time = `${milliseconds.toFixed(1)} ms; the last exit alone takes ${input.whole.toFixed(1)} ms.`;
      this.show(made("strong", {}, label), `${confidence} after layer ${answer.layers} of ${end}. ${time}`);
      this.showExits(exits, answer.layers, settings);
    } catch (error) {
      this.fail(error);
    }
  }

  showExits(exits, layers, settings) {
    const { about } = this.page.model;
    const exitedAt = about.exits.indexOf(layers);
    const rows = exits.map((exit, k) => {
      const pairs = compared(exit, about.about.compares, settings, k);
      const reason = k > exitedAt ? "not run; it would predict this" : reasonOf(pairs, k === exitedAt, k === exits.length - 1);
      const [, , threshold] = pairs.find(([, value]) => Math.abs(value - exit.confidence) < SAME) ?? [];
      const confidence = exit.confidence === undefined ? "" : `${(100 * exit.confidence).toFixed(1)}%`;
      const label = typeof exit.label === "number" ? exit.label.toFixed(3) : exit.label;
      const row = made(
        "li",
        { className: k < exitedAt ? "run" : k === exitedAt ? "exited" : "not-run" },
        made("div", { className: "prediction" }, made("span", {}, `Layer ${exit.layers}: ${label}`), made("span", {}, confidence)),
        exit.confidence === undefined ? "" : bar(exit.confidence, threshold),
        made("div", { className: "reason" }, reason),
      );
      row.style.animationDelay = `${Math.min(k, exitedAt) * APPEAR_STEP}ms`;
      return row;
    });
    at(".exits", this.element).replaceChildren(...rows);
  }
}

/** What the rule compares at exit k: [name of the setting, value, setting] for each setting of which the graph returns it. */
function compared(exit, names, settings, k) {
  const all = Object.entries(exit.compared).map(([input, value]) => {
    const { values } = settings[input];
    return [names[input].replaceAll("_", " "), value, number(values[k] ?? values[0])];
  });
  return all.filter(([, value]) => Number.isFinite(value));
}

/** Why a text exits here or continues. pairs: what the rule compares. */
function reasonOf(pairs, exits, isLast) {
  if (isLast) return "the last exit: every text that reaches it exits";
  const words = pairs.map(([name, value, setting]) => `${digits(value)}, ${name} ${digits(setting)}`);
  return `${words.join("; ") || "the rule compares nothing here"}: it ${exits ? "exits" : "continues"}`;
}

/** A probability as a bar, with a mark at the threshold, if there is one. */
function bar(probability, threshold) {
  const filled = made("span");
  filled.style.width = `${100 * probability}%`;
  const mark = made("i");
  mark.style.left = `${100 * threshold}%`;
  return made("div", { className: "bar" }, filled, threshold <= 1 ? mark : "");
}
