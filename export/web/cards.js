// A card of the classifiers' page: sentences, what every exit says of them, and where the rule lets them leave.
import { at, made } from "./dom.js";
import { probabilityAsked, why } from "./rules.js";

const STEP = 60; // milliseconds from one exit that appears to the next

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

  /** Ask every exit about the texts, then the rule. */
  async read() {
    const texts = this.fields.map((field) => field.value);
    const asked = (this.asked = {});
    this.said = null;
    if (texts.some((text) => !text.trim())) return this.fail("Write a sentence first.");
    this.say("Reading…");
    try {
      const said = await this.page.model.exits(texts);
      const whole = await this.page.model.time(texts, this.page.settings, [said.length - 1]);
      if (asked !== this.asked) return; // asked anew meanwhile
      this.said = { texts, exits: said, whole };
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
      const taken = await model.time(said.texts, settings);
      if (said !== this.said || settings !== this.page.settings) return; // asked anew meanwhile
      const end = model.about.exits.at(-1);
      const sure = answer.confidence === undefined ? "" : ` (${(100 * answer.confidence).toFixed(1)} % sure)`;
      const label = typeof answer.label === "number" ? answer.label.toFixed(3) : answer.label;
      const time = `${taken.toFixed(1)} ms; the last exit alone takes ${said.whole.toFixed(1)} ms.`;
      this.say(made("strong", {}, label), `${sure} after layer ${answer.layers} of ${end}. ${time}`);
      this.showExits(answer, settings);
    } catch (error) {
      this.fail(error);
    }
  }

  showExits(answer, settings) {
    const { about } = this.page.model;
    const left = about.exits.indexOf(answer.layers);
    const rows = this.said.exits.map((exit, k) => {
      const reason = k > left ? "not run; it would say this" : why(about, settings, this.said.exits, k, k === left);
      const sure = exit.confidence === undefined ? "" : `${(100 * exit.confidence).toFixed(1)} %`;
      const label = typeof exit.label === "number" ? exit.label.toFixed(3) : exit.label;
      const row = made(
        "li",
        { className: k < left ? "run" : k === left ? "left" : "beyond" },
        made("div", { className: "said" }, made("span", {}, `Layer ${exit.layers}: ${label}`), made("span", {}, sure)),
        exit.confidence === undefined ? "" : bar(exit.confidence, probabilityAsked(about, settings, k)),
        made("div", { className: "why" }, reason),
      );
      row.style.animationDelay = `${Math.min(k, left) * STEP}ms`;
      return row;
    });
    at(".exits", this.element).replaceChildren(...rows);
  }
}

/** A probability as a bar, with a mark at the one that is asked for, if one is. */
function bar(probability, asked) {
  const filled = made("span");
  filled.style.width = `${100 * probability}%`;
  const mark = made("i");
  mark.style.left = `${100 * asked}%`;
  return made("div", { className: "bar" }, filled, asked <= 1 ? mark : "");
}
