// A decoder that generates one token at a time, as the loop in exits/decoding.py does. No DOM here.
import { Model, tensor, zeros } from "./session.js";

export class Decoder extends Model {
  /**
   * Generate up to `count` tokens after a text, greedily, until a stop token.
   * Yields {id, ends, text, layers, milliseconds} for each token; text: all generated text so far.
   */
  async *generate(text, count, settings = this.about.settings) {
    const { exits, max_length: room, stop } = this.about;
    if (!text.trim()) throw new Error("Write a prompt first.");
    const { ids } = this.encode([text]);
    if (!ids.length) throw new Error("This prompt has no tokens.");
    if (ids.length + count > room) {
      throw new Error(`Prompt and text may have ${room} tokens together: shorten the prompt, or generate fewer tokens.`);
    }
    const state = { settings: this.settingTensors(settings), caches: this.#empty(ids.length + count + 1), at: 0 };
    const before = exits.length > 1 ? ids.slice(0, -1) : [];
    if (before.length) await this.#run(state, before, { exit_at: tensor("int64", [exits.length - 1]) });
    let next = ids.slice(before.length);
    for (const generated = []; generated.length < count && !stop.includes(generated.at(-1)); ) {
      const { outputs, milliseconds } = await this.#run(state, next);
      const id = argmax(outputs.logits.data);
      next = [id];
      generated.push(id);
      const layers = Number(outputs.layers.data[0]);
      yield { id, ends: stop.includes(id), text: this.#textAfter(ids, generated), layers, milliseconds };
    }
  }

  /** Run tokens through the graph, after those in the caches. plan: settings that override others. */
  async #run(state, tokens, plan = {}) {
    const whole = (values) => tensor("int64", values, [1, values.length]);
    const where = { positions: whole(tokens.map((_, nth) => state.at + nth)), rows: tensor("int64", [0]) };
    const answer = await this.compute({ ...state.settings, ...plan, ...where, ...state.caches, input_ids: whole(tokens) });
    for (const name of Object.keys(state.caches)) state.caches[name] = answer.outputs[`${name}_out`];
    state.at += tokens.length;
    return answer;
  }

  /** Empty caches of one text; the last slot is for padding. */
  #empty(slots) {
    const caches = this.session.inputMetadata.filter(({ name }) => /^(keys|values)_/.test(name));
    return Object.fromEntries(caches.map(({ name, type, shape }) => [name, zeros(type, [1, slots, shape[2]])]));
  }

  /** The text of tokens after those of a prompt. */
  #textAfter(prompt, tokens) {
    return this.#text([...prompt, ...tokens]).slice(this.#text(prompt).length);
  }

  #text(ids) {
    const known = ids.filter((id) => this.tokenizer.id_to_token(id) !== undefined);
    const settings = { skip_special_tokens: true, clean_up_tokenization_spaces: false };
    return known.length ? this.tokenizer.decode(known, settings) : "";
  }
}

function argmax(values) {
  let best = 0;
  for (let at = 1; at < values.length; at++) if (values[at] > values[best]) best = at;
  return best;
}
