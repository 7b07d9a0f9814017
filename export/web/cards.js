// A card of the classifiers' page: sentences, what every exit says of them, and where the rule lets them leave.
import { at, made } from "./dom.js";
import { digits, number } from "./numbers.js";

const STEP = 60; // milliseconds from one exit that appears to the next
const NEAR = 1e-6; // two float32 that are one probability

export class Card {
  constructor(name, page) {
    this.page = page;
    this.element = at("#card").content.cloneNode(true).firstElementChild;
    const count = page.model.about.texts;
    this.fields = Array.from({ length: count }, () => made("textarea", { rows: 2 }));
    const names = count === 1 ? [`${name} sentence`] : [`${name} pair, one sentence`, `${name} pair, the other`];
    const form = at("form", this.element);
    form.append(...this.fields.map((field, each) => made("label", {}, names[each], field)), made("button", {}, "Read it"));
    form.onsubmit = (event) => (event.preventDefault(), this.read());
    form.addEventListener("focusin", () => (page.used = this));
    for (const field of this.fields) field.onkeydown = (event) => this.key(event);
  }

  key(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.read();
  }

  fill(texts) {
    this.fields.forEach((field, index) => (field.value = texts[index] ?? ""));
    if (texts.length) this.read();
  }

  say(...words) {
    at(".verdict", this.element).classList.remove("failed");
    at(".verdict", this.element).replaceChildren(...words);
  }

  fail(error) {
    this.say(error.message ?? String(error));
    at(".verdict", this.element).classList.add("failed");
    at(".exits", this.element).replaceChildren();
  }

  /** Run the texts through all layers, then under the rule. */
  async read() {
    const texts = this.fields.map((field) => field.value);
    const asked = (this.asked = {});
    this.said = null;
    if (texts.some((text) => !text.trim())) return this.fail("Write a sentence first.");
    this.say("Reading…");
    try {
      const { model, settings } = this.page;
      const whole = await model.time(texts, settings, [model.about.exits.length - 1]);
      if (asked !== this.asked) return; // asked anew meanwhile
      this.said = { texts, whole };
      await this.decide();
    } catch (error) {
      if (asked === this.asked) this.fail(error);
    }
  }

  /** Show where the rule lets the texts leave, and what it took. */
  async decide() {
    const { model, settings } = this.page;
    const said = this.said;
    if (!said) return;
    try {
      const answer = await model.decide(said.texts, settings);
      const exits = await model.exits(said.texts, settings);
      const taken = await model.time(said.texts, settings);
      if (said !== this.said || settings !== this.page.settings) return; // asked anew meanwhile
      const end = model.about.exits.at(-1);
      const sure = answer.confidence === undefined ? "" : ` (${(100 * answer.confidence).toFixed(1)} % sure)`;
      const label = typeof answer.label === "number" ? answer.label.toFixed(3) : answer.label;
      const time = `${taken.toFixed(1)} ms; the last exit alone takes ${said.whole.toFixed(1)} ms.`;
      this.say(made("strong", {}, label), `${sure} after layer ${answer.layers} of ${end}. ${time}`);
      this.showExits(exits, answer.layers, settings);
    } catch (error) {
      this.fail(error);
    }
  }

  showExits(exits, layers, settings) {
    const { about } = this.page.model;
    const left = about.exits.indexOf(layers);
    const rows = exits.map((exit, k) => {
      const pairs = compared(exit, about.about.compares, settings, k);
      const reason = k > left ? "not run; it would say this" : why(pairs, k === left, k === exits.length - 1);
      const [, , threshold] = pairs.find(([, value]) => Math.abs(value - exit.confidence) < NEAR) ?? [];
      const sure = exit.confidence === undefined ? "" : `${(100 * exit.confidence).toFixed(1)} %`;
      const label = typeof exit.label === "number" ? exit.label.toFixed(3) : exit.label;
      const row = made(
        "li",
        { className: k < left ? "run" : k === left ? "left" : "beyond" },
        made("div", { className: "said" }, made("span", {}, `Layer ${exit.layers}: ${label}`), made("span", {}, sure)),
        exit.confidence === undefined ? "" : bar(exit.confidence, threshold),
        made("div", { className: "why" }, reason),
      );
      row.style.animationDelay = `${Math.min(k, left) * STEP}ms`;
      return row;
    });
    at(".exits", this.element).replaceChildren(...rows);
  }
}

/** What the rule compares at exit k: [name of the setting, value, setting] of each setting that the graph tells of. */
function compared(exit, names, settings, k) {
  const all = Object.entries(exit.compared).map(([input, value]) => {
    const { values } = settings[input];
    return [names[input].replaceAll("_", " "), value, number(values[k] ?? values[0])];
  });
  return all.filter(([, value]) => Number.isFinite(value));
}

/** Why a text exits here, or goes on. pairs: what the rule compares. */
function why(pairs, exits, isLast) {
  if (isLast) return "the last exit takes all that is left";
  const words = pairs.map(([name, value, setting]) => `${digits(value)}, ${name} ${digits(setting)}`);
  return `${words.join("; ") || "the rule reads nothing here"}: it ${exits ? "exits" : "goes on"}`;
}

/** A probability as a bar, with a mark at the one that is asked for, if one is. */
function bar(probability, asked) {
  const filled = made("span");
  filled.style.width = `${100 * probability}%`;
  const mark = made("i");
  mark.style.left = `${100 * asked}%`;
  return made("div", { className: "bar" }, filled, asked <= 1 ? mark : "");
}
