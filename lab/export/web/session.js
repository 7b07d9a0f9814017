// The graph that stops by itself and its tokenizer, for classifiers and decoders. No DOM here.
import * as ort from "./vendor/ort.wasm.bundle.min.mjs";
import { Tokenizer } from "./vendor/tokenizers.min.mjs";
import { number } from "./numbers.js";

const ARRAYS = { float32: Float32Array, float16: globalThis.Float16Array ?? Uint16Array };

/** An input of the graph. values: numbers, as web.json holds them. */
export function tensor(dtype, values, shape = [values.length]) {
  const array = dtype === "int64" ? BigInt64Array.from(values, BigInt) : ARRAYS[dtype].from(values, number);
  return new ort.Tensor(dtype, array, shape);
}

/** An input of zeros. */
export function zeros(dtype, shape) {
  return new ort.Tensor(dtype, new ARRAYS[dtype](shape.reduce((size, axis) => size * axis)), shape);
}

/** A session of ONNX Runtime. weights: the bytes of model.onnx_data. */
export function openSession(graph, weights) {
  ort.env.wasm.numThreads = 1; // more threads need headers that a plain file server does not send
  const externalData = [{ path: "model.onnx_data", data: weights }];
  return ort.InferenceSession.create(graph, { externalData, logSeverityLevel: 3 });
}

export class Model {
  constructor(about, tokenizer, session) {
    this.about = about;
    this.session = session;
    this.tokenizer = new Tokenizer(tokenizer, {});
    this.onlyZeros = tokenizer.post_processor?.type === "RobertaProcessing"; // the library would return 1 for a second text
    this.left = tokenizer.truncation?.direction === "Left"; // the side on which texts are cut
    this.queue = Promise.resolve(); // a session runs one call at a time
  }

  /** One text or two -> {ids, types}, cut as mini_ee cuts them: of two texts the longer one. */
  encode(texts) {
    const { tokenizer } = this;
    const after = tokenizer.post_processor ?? ((tokens) => ({ tokens }));
    const words = texts.map((text) => tokenizer.tokenize(text, { add_special_tokens: false }));
    const special = after([], words.length > 1 ? [] : null).tokens.length;
    const sizes = truncated(words.map((each) => each.length), this.about.max_length - special);
    const [first, second = null] = words.map((each, at) => (this.left ? each.slice(each.length - sizes[at]) : each.slice(0, sizes[at])));
    const { tokens, token_type_ids: types } = after(first, second);
    const ids = tokens.map((token) => tokenizer.token_to_id(token) ?? tokenizer.model.unk_token_id);
    return { ids, types: types && !this.onlyZeros ? types : ids.map(() => 0) };
  }

  /** Throw if this tokenizer gives other tokens for the examples than Python. */
  checkTokens() {
    for (const { texts, ids } of this.about.examples) {
      if (String(this.encode(texts).ids) !== String(ids)) {
        throw new Error(`tokenizer.json: gives other tokens in this browser than in Python for “${texts.join(" | ")}”`);
      }
    }
  }

  /** The inputs of the graph that are settings. */
  settingTensors(settings) {
    return Object.fromEntries(Object.entries(settings).map(([name, { dtype, values }]) => [name, tensor(dtype, values)]));
  }

  /** Run the graph when it is free: outputs by name, and the milliseconds of the run alone. */
  compute(feeds) {
    const work = async () => {
      const begin = performance.now();
      const outputs = await this.session.run(feeds);
      return { outputs, milliseconds: performance.now() - begin };
    };
    this.queue = this.queue.catch(() => null).then(work);
    return this.queue;
  }
}

/** The number of tokens of one text or two after truncation to `room` tokens. */
function truncated(sizes, room) {
  if (sizes.length === 1) return [Math.min(sizes[0], room)];
  const [short, long] = [Math.min(...sizes), Math.max(...sizes)];
  if (short + long <= room) return sizes;
  const half = Math.floor(room / 2);
  const ordered = short <= half ? [short, room - short] : [half, room - half];
  return sizes[0] <= sizes[1] ? ordered : ordered.reverse();
}
