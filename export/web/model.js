// An exported folder in the browser: the tokens of a text, and the graph that stops by itself. No DOM here.
import * as ort from "./vendor/ort.wasm.bundle.min.mjs";
import { Tokenizer } from "./vendor/tokenizers.min.mjs";
import { number } from "./rules.js";

/** Read an exported folder, which the page stands in. Throws an Error that names the file that is missing or damaged. */
export async function openModel() {
  const manifest = JSON.parse(new TextDecoder().decode(await read("manifest.json")));
  const file = (name) => read(name, manifest.files[name]);
  const names = ["web.json", "tokenizer.json", "model_web.onnx", "model.safetensors"];
  const [about, tokenizer, graph, weights] = await Promise.all(names.map(file));
  ort.env.wasm.numThreads = 1; // more need headers that a plain file server does not send
  const session = await ort.InferenceSession.create(graph, {
    externalData: [{ path: "model.safetensors", data: weights }],
    logSeverityLevel: 3,
  });
  const [described, tokens] = [about, tokenizer].map((bytes) => JSON.parse(new TextDecoder().decode(bytes)));
  const model = new Model(described, tokens, session);
  model.checkTokens();
  return model;
}

/** The bytes of a file beside the page, compared with its SHA-256 where the browser offers one. */
async function read(name, digest) {
  const answer = await fetch(name).catch(() => null);
  if (!answer?.ok) throw new Error(`${name}: ${answer ? `the server says ${answer.status}` : "the server is silent"}`);
  const bytes = new Uint8Array(await answer.arrayBuffer());
  if (digest && globalThis.crypto?.subtle) {
    const found = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
    const text = Array.from(found, (byte) => byte.toString(16).padStart(2, "0")).join("");
    if (text !== digest) throw new Error(`${name}: is not the file that was exported; export the run again`);
  }
  return bytes;
}

class Model {
  constructor(about, tokenizer, session) {
    this.about = about;
    this.session = session;
    this.tokenizer = new Tokenizer(tokenizer, {});
    this.onlyZeros = tokenizer.post_processor?.type === "RobertaProcessing"; // the library would say 1 of a second text
    this.turn = Promise.resolve(); // a session answers one call at a time
  }

  /** One text or two -> {ids, types}, cut as mini_ee cuts them: of two texts the longer one. */
  encode(texts) {
    const { tokenizer } = this;
    const after = tokenizer.post_processor ?? ((tokens) => ({ tokens }));
    const words = texts.map((text) => tokenizer.tokenize(text, { add_special_tokens: false }));
    const special = after([], words.length > 1 ? [] : null).tokens.length;
    const sizes = fitted(words.map((each) => each.length), this.about.max_length - special);
    const [first, second = null] = words.map((each, at) => each.slice(0, sizes[at]));
    const { tokens, token_type_ids: types } = after(first, second);
    const ids = tokens.map((token) => tokenizer.token_to_id(token) ?? tokenizer.model.unk_token_id);
    return { ids, types: types && !this.onlyZeros ? types : ids.map(() => 0) };
  }

  /** Throw where this tokenizer gives other tokens than Python's gave of the examples. */
  checkTokens() {
    for (const { texts, ids } of this.about.examples) {
      if (String(this.encode(texts).ids) !== String(ids)) {
        throw new Error(`tokenizer.json: gives other tokens here than in Python, of “${texts.join(" | ")}”`);
      }
    }
  }

  /** What each exit says of the texts: one answer an exit, see `run`. */
  exits(texts) {
    return this.run(texts, this.about.settings, this.about.exits.map((_, at) => at));
  }

  /** Where the rule, with these settings, lets the texts leave. */
  async decide(texts, settings = this.about.settings) {
    return (await this.run(texts, settings, settings.exit_at.values))[0];
  }

  /** Milliseconds of one answer at the exit where the rule lets the texts leave, or at another: the middle one of three. */
  async time(texts, settings, [exitAt] = settings.exit_at.values) {
    const taken = [];
    for (let at = 0; at < 3; at++) {
      taken.push((await this.run(texts, settings, [exitAt]))[0].milliseconds);
    }
    return taken.sort((a, b) => a - b)[1];
  }

  /** One answer for each number in exitAt: the index of the exit to leave at, or -1 where the rule decides. */
  run(texts, settings, exitAt) {
    this.turn = this.turn.catch(() => null).then(() => this.#run(texts, settings, exitAt));
    return this.turn;
  }

  async #run(texts, settings, exitAt) {
    const { ids, types } = this.encode(texts);
    const whole = (values, shape = [values.length]) => new ort.Tensor("int64", BigInt64Array.from(values, BigInt), shape);
    const rows = (values) => whole(exitAt.flatMap(() => values), [exitAt.length, values.length]);
    const feeds = { exit_at: whole(exitAt) };
    for (const [name, { dtype, values }] of Object.entries(settings)) {
      if (name === "exit_at") continue;
      feeds[name] = dtype === "int64" ? whole(values) : new ort.Tensor(dtype, Float32Array.from(values, number));
    }
    const inputs = { input_ids: ids, attention_mask: ids.map(() => 1), token_type_ids: types };
    for (const name of this.session.inputNames) {
      if (name in inputs) feeds[name] = rows(inputs[name]);
    }
    const begin = performance.now(); // without the wait for one's turn
    const { logits, label, confidence, layers, exit_logit: exitLogit } = await this.session.run(feeds);
    const milliseconds = performance.now() - begin;
    return exitAt.map((_, row) => ({
      label: this.about.labels[Number(label.data[row])] ?? label.data[row],
      logits: Array.from(logits.data.slice(row * logits.dims[1], (row + 1) * logits.dims[1])),
      confidence: confidence && confidence.data[row],
      layers: Number(layers.data[row]),
      exitLogit: exitLogit && exitLogit.data[row],
      milliseconds,
    }));
  }
}

/** How many tokens of one text or two stay, where `room` are left for them. */
function fitted(sizes, room) {
  if (sizes.length === 1) return [Math.min(sizes[0], room)];
  const [short, long] = [Math.min(...sizes), Math.max(...sizes)];
  if (short + long <= room) return sizes;
  const half = Math.floor(room / 2);
  const kept = short <= half ? [short, room - short] : [half, room - half];
  return sizes[0] <= sizes[1] ? kept : kept.reverse();
}
