// A classifier: the predictions of its exits for one text or two. No DOM here.
import { Model, tensor } from "./session.js";

export class Classifier extends Model {
  /** The prediction of each exit, and what the rule with these settings compares there: see `run`. */
  exits(texts, settings = this.about.settings) {
    return this.run(texts, settings, this.about.exits.map((_, at) => at));
  }

  /** The answer at the exit that the rule with these settings chooses. */
  async decide(texts, settings = this.about.settings) {
    return (await this.run(texts, settings, settings.exit_at.values))[0];
  }

  /** Milliseconds of one answer at the exit that the rule chooses, or at another one: the median of three. */
  async time(texts, settings, [exitAt] = settings.exit_at.values) {
    const times = [];
    for (let at = 0; at < 3; at++) {
      times.push((await this.run(texts, settings, [exitAt]))[0].milliseconds);
    }
    return times.sort((a, b) => a - b)[1];
  }

  /** One answer for each number in exitAt: the index of an exit, or -1 if the rule decides. */
  async run(texts, settings, exitAt) {
    const { ids, types } = this.encode(texts);
    const inputs = { input_ids: ids, attention_mask: ids.map(() => 1), token_type_ids: types };
    const feeds = { ...this.settingTensors(settings), exit_at: tensor("int64", exitAt) };
    for (const name of this.session.inputNames) {
      if (name in inputs) feeds[name] = tensor("int64", exitAt.flatMap(() => inputs[name]), [exitAt.length, ids.length]);
    }
    const { outputs, milliseconds } = await this.compute(feeds);
    const { label, confidence, layers } = outputs;
    const compared = Object.keys(settings).filter((name) => `compared_${name}` in outputs);
    return exitAt.map((_, row) => ({
      label: this.about.labels[Number(label.data[row])] ?? label.data[row],
      confidence: confidence && confidence.data[row],
      layers: Number(layers.data[row]),
      compared: Object.fromEntries(compared.map((name) => [name, outputs[`compared_${name}`].data[row]])),
      milliseconds,
    }));
  }
}
