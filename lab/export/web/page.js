// The page of an exported folder: predictions or generated text, the slider for a setting of the rule, and its curve.
import { Card } from "./cards.js";
import { drawChart } from "./chart.js";
import { at, made } from "./dom.js";
import { digits, number } from "./numbers.js";
import { Generator } from "./generator.js";

const SLIDER_PAUSE = 150; // milliseconds after the last move of the slider, before the model runs

/** Title and content of the part below the rule, for classifiers (rows) and decoders (tokens). */
const PARTS = {
  rows: ["What it predicts", (page) => ["First", "Second"].map((name) => new Card(name, page))],
  tokens: ["What it generates", (page) => [new Generator(page)]],
};

/** Settings of the graph, with one value at all exits for the input that the slider moves. */
function moved(settings, name, value) {
  const { dtype, values } = settings[name];
  return { ...settings, [name]: { dtype, values: values.map(() => value) } };
}

/** The sentence about the rule, and its settings. */
function described({ words, fixed, compares }, settings) {
  const own = Object.entries(compares).filter(([input]) => input in settings);
  const shown = own.map(([input, name]) => {
    const values = settings[input].values.map(number);
    const same = values.every((value) => value === values[0]);
    return [name, same ? digits(values[0]) : `${values.map(digits).join(", ")} (exit by exit)`];
  });
  const all = [...shown, ...Object.entries(fixed)].map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`);
  return all.length ? `${words} Here: ${all.join("; ")}.` : words;
}

class Page {
  constructor(model) {
    this.model = model;
    this.settings = model.about.settings;
    const [title, cards] = PARTS[model.about.unit];
    at("#cards-title").textContent = title;
    this.cards = cards(this);
  }

  start() {
    const { about } = this.model;
    const depth = `${about.exits.length} exits in ${about.exits.at(-1)} layers`;
    const words = [about.task, about.method, depth].filter(Boolean); // a decoder has no task
    at("#about").textContent = `A model that stops at the first layer that is confident enough: ${words.join(", ")}.`;
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

  /** Put an example into the last used card. */
  fill(texts) {
    (this.used ?? this.cards[0]).fill(texts);
  }

  showRule() {
    const { about, curve, settings } = this.model.about;
    if (!curve) {
      const none = "The run has no curve for this rule: train the run again, or choose another rule.";
      at("#rule-score").textContent = this.model.about.exits.length > 1 ? none : "";
      return this.move(null);
    }
    const own = settings[curve.setting].values;
    const same = (value) => own.every((each) => each === value);
    const first = curve.points.findIndex(([value]) => same(value));
    at("#slider").ariaLabel = about.knob;
    at("#slider").max = curve.points.length - 1;
    at("#slider").oninput = () => this.move(at("#slider").valueAsNumber);
    at("#own-setting").onclick = () => this.move(first < 0 ? null : first);
    at("#knob").hidden = false;
    this.move(first < 0 ? null : first);
  }

  /** Use the settings of a point of the curve; null: the run's own. */
  move(chosen) {
    const { about } = this.model;
    const { curve } = about;
    const point = chosen === null ? null : curve.points[chosen];
    this.settings = point ? moved(about.settings, curve.setting, point[0]) : about.settings;
    at("#rule-text").textContent = described(about.about, this.settings);
    if (curve) {
      const end = about.exits.at(-1);
      at("#slider").value = chosen ?? 0;
      at("#slider").ariaValueText = point ? `${curve.setting} ${digits(number(point[0]))}` : "the run’s own setting";
      const [score, layers] = point?.slice(1) ?? curve.own ?? [];
      at("#rule-score").textContent = layers !== undefined
        ? `On ${curve.of}: ${curve.score} ${score.toFixed(3)} after ${layers.toFixed(2)} of ${end} layers on average.`
        : `The run’s own setting is not a point of this curve, which was measured on ${curve.of}.`;
      at("#chart").replaceChildren(drawChart(curve, end, chosen, (index) => this.move(index)));
    }
    clearTimeout(this.soon);
    this.soon = setTimeout(() => this.cards.forEach((card) => card.decide()), SLIDER_PAUSE);
  }
}

async function main() {
  try {
    const { openModel } = await import("./model.js").catch((error) => {
      throw new Error(`The libraries of this page are missing; vendor.sh downloads them into vendor/ (${error.message})`);
    });
    new Page(await openModel()).start();
  } catch (error) {
    at("#status").className = "failed";
    at("#status").textContent = error.message ?? String(error);
  }
}

main();
