// The page of an exported folder: two cards with sentences, the setting of the rule that moves, and its curve.
import { drawChart } from "./chart.js";
import { digits, number, probabilityAsked, shown, why } from "./rules.js";

const PAUSE = 150; // milliseconds that a moved slider rests before the model is asked
const STEP = 60; // milliseconds from one exit that appears to the next

const at = (selector, inside = document) => inside.querySelector(selector);
const made = (tag, properties = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
};

/** Settings of the graph with one value at each exit for the input that moves. */
function moved(settings, name, value) {
  const { dtype, values } = settings[name];
  return { ...settings, [name]: { dtype, values: values.map(() => value) } };
}

class Page {
  constructor(model) {
    this.model = model;
    this.settings = model.about.settings;
    this.cards = ["First", "Second"].map((name) => new Card(name, this));
  }

  start() {
    const { about } = this.model;
    const words = [about.task, about.method, `${about.exits.length} exits in ${about.exits.at(-1)} layers`];
    at("#about").textContent = `A model that stops at the first layer that is sure enough: ${words.join(", ")}.`;
    at("#cards").append(...this.cards.map((card) => card.element));
    for (const { texts } of about.examples) {
      const button = made("button", { type: "button", textContent: texts.join(" | ") });
      button.onclick = () => this.fill(texts);
      at("#examples").append(button);
    }
    this.showRule();
    this.cards.forEach((card, index) => card.fill(about.examples[index]?.texts ?? []));
    at("#status").textContent = "";
    at("main").hidden = false;
  }

  /** Put an example into the card that was used last. */
  fill(texts) {
    (this.used ?? this.cards[0]).fill(texts);
  }

  showRule() {
    const { curve, settings } = this.model.about;
    if (!curve) {
      const none = "The run holds no curve of such a rule over its held-out rows: train it again, or choose another rule.";
      at("#kept").textContent = this.model.about.exits.length > 1 ? none : "";
      return this.move(null);
    }
    const own = settings[curve.setting].values;
    const same = (value) => own.every((each) => each === value);
    const first = curve.points.findIndex(([value]) => same(value));
    at("#slider").max = curve.points.length - 1;
    at("#slider").oninput = () => this.move(at("#slider").valueAsNumber);
    at("#own").onclick = () => this.move(first < 0 ? null : first);
    at("#knob").hidden = false;
    this.move(first < 0 ? null : first);
  }

  /** Take the settings of a point of the curve; null: the run's own. */
  move(chosen) {
    const { about } = this.model;
    const { curve } = about;
    const point = chosen === null ? null : curve.points[chosen];
    this.settings = point ? moved(about.settings, curve.setting, point[0]) : about.settings;
    at("#rule-says").textContent = shown(about, this.settings);
    if (curve) {
      const end = about.exits.at(-1);
      at("#slider").value = chosen ?? 0;
      at("#slider").ariaValueText = point ? `${curve.setting} ${digits(number(point[0]))}` : "the run’s own";
      at("#kept").textContent = point
        ? `On ${curve.rows} held-out rows: ${curve.score} ${point[1].toFixed(3)} after ${point[2].toFixed(2)} of ${end} layers on average.`
        : `The run’s own setting is no point of the curve, which is that of ${curve.rows} held-out rows.`;
      at("#chart").replaceChildren(drawChart(curve, end, chosen, (index) => this.move(index)));
    }
    clearTimeout(this.soon);
    this.soon = setTimeout(() => this.cards.forEach((card) => card.decide()), PAUSE);
  }
}

class Card {
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
    this.said = null;
    if (texts.some((text) => !text.trim())) return this.fail("Write a sentence first.");
    this.say("Reading…");
    try {
      const said = await this.page.model.exits(texts);
      this.said = { texts, exits: said, whole: await this.page.model.time(texts, this.page.settings, [said.length - 1]) };
      await this.decide();
    } catch (error) {
      this.fail(error);
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

async function main() {
  try {
    const { openModel } = await import("./model.js").catch((error) => {
      throw new Error(`The libraries of this page cannot be read; vendor.sh puts them into vendor/ (${error.message})`);
    });
    new Page(await openModel()).start();
  } catch (error) {
    at("#status").className = "failed";
    at("#status").textContent = error.message ?? String(error);
  }
}

main();
