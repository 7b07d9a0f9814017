// The card of the page for decoders: a prompt and the text generated after it, each token in the colour of its exit layer.
import { at, made } from "./dom.js";

const DEFAULT_TOKENS = 60;
const INCOMPLETE = "\ufffd"; // stands for a character whose last bytes are missing

export class Generator {
  constructor(page) {
    this.page = page;
    this.element = at("#generator").content.cloneNode(true).firstElementChild;
    const form = at("form", this.element);
    const { max_length: room, examples } = page.model.about;
    const free = room - Math.max(...examples.map(({ ids }) => ids.length));
    Object.assign(at("input", form), { max: room - 1, value: Math.min(DEFAULT_TOKENS, free) });
    form.onsubmit = (event) => (event.preventDefault(), this.generating ? this.stop() : this.start());
    form.onkeydown = (event) => this.key(event, form);
  }

  key(event, form) {
    if (event.key === "Escape") this.stop();
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.target.localName === "button") return;
    event.preventDefault();
    this.stop();
    form.requestSubmit();
  }

  fill([text = ""]) {
    at("textarea", this.element).value = text;
    if (!text) return;
    this.stop();
    at("form", this.element).requestSubmit();
  }

  /** Continue the prompt in the field. */
  start() {
    this.request = [at("textarea", this.element).value, at("input", this.element).valueAsNumber];
    this.generate();
  }

  /** The settings have changed: generate the text again. */
  decide() {
    if (this.request && this.settings !== this.page.settings) this.generate();
  }

  async generate() {
    const [prompt, count] = this.request;
    const generating = (this.generating = { layers: [], milliseconds: 0 });
    this.settings = this.page.settings;
    this.show("Stop", "Generating…");
    at(".generated", this.element).replaceChildren(made("span", { className: "prompt", textContent: prompt }));
    this.showLegend();
    let shown = 0;
    try {
      for await (const { ends, text, layers, milliseconds } of this.page.model.generate(prompt, count, this.settings)) {
        if (this.generating !== generating) return; // stopped, or a newer request has started
        generating.layers.push(layers);
        generating.milliseconds += milliseconds;
        const whole = ends || generating.layers.length === count || !text.endsWith(INCOMPLETE);
        this.add(whole ? text.slice(shown) : "", layers, ends);
        if (whole) shown = text.length;
        await new Promise((done) => setTimeout(done)); // let the page be drawn
      }
      if (this.generating === generating) this.stop("");
    } catch (error) {
      if (this.generating === generating) this.fail(error);
    }
  }

  /** Stop generating, and show a summary. */
  stop(reason = "Stopped. ") {
    if (!this.generating) return;
    const { layers, milliseconds } = this.generating;
    this.generating = null;
    const [end, count] = [this.page.model.about.exits.at(-1), layers.length];
    const mean = layers.reduce((sum, each) => sum + each, 0) / count;
    const saved = made("strong", {}, `${(100 * (1 - mean / end)).toFixed(0)}% of the layers saved`);
    const words = `: ${mean.toFixed(2)} of ${end} on average over ${count} tokens`;
    const time = `; ${(milliseconds / count).toFixed(1)} ms per token.`;
    this.show("Generate", reason, ...(count ? [saved, words, time] : []));
  }

  fail(error) {
    this.generating = null;
    this.show("Generate", error.message ?? String(error));
    at(".verdict", this.element).classList.add("failed");
  }

  /** Set the label of the button and the line below it. */
  show(button, ...words) {
    at("button", this.element).textContent = button;
    at(".verdict", this.element).classList.remove("failed");
    at(".verdict", this.element).replaceChildren(...words);
  }

  /** Append a token to the text. */
  add(text, layers, ends) {
    const token = made("span", { className: ends ? "token end" : "token", title: `layer ${layers}`, textContent: text });
    at(".generated", this.element).append(this.coloured(token, layers));
    this.showLegend();
  }

  /** The colour of a layer depends on the index of its exit. */
  coloured(element, layers) {
    const { exits } = this.page.model.about;
    element.style.setProperty("--at", exits.indexOf(layers) / Math.max(1, exits.length - 1));
    return element;
  }

  showLegend() {
    const depths = this.generating.layers;
    const entries = this.page.model.about.exits.map((layer) => {
      const count = depths.filter((each) => each === layer).length;
      const share = depths.length ? `, ${((100 * count) / depths.length).toFixed(0)}%` : "";
      const sample = made("span", { className: "token" }, `layer ${layer}`);
      return made("li", {}, this.coloured(sample, layer), ` ${count}${share}`);
    });
    at(".legend", this.element).replaceChildren(...entries);
  }
}
