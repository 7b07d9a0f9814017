// Reads an exported folder in the browser: checks its files and opens the model. No DOM here.
import { Classifier } from "./classifier.js";
import { Decoder } from "./decoder.js";
import { openSession } from "./session.js";

const MODELS = { rows: Classifier, tokens: Decoder };

/** Open the exported folder of this page. Throws an Error that names a missing or damaged file. */
export async function openModel() {
  const manifest = JSON.parse(new TextDecoder().decode(await read("manifest.json")));
  const file = (name) => read(name, manifest.files[name]);
  const names = ["web.json", "tokenizer.json", "onnx/model_web.onnx", "onnx/model.onnx_data"];
  const [about, tokenizer, graph, weights] = await Promise.all(names.map(file));
  const [described, tokens] = [about, tokenizer].map((bytes) => JSON.parse(new TextDecoder().decode(bytes)));
  const model = new MODELS[described.unit](described, tokens, await openSession(graph, weights));
  model.checkTokens();
  return model;
}

/** The bytes of a file next to the page, verified by SHA-256 if the browser supports it. */
async function read(name, digest) {
  const answer = await fetch(name).catch(() => null);
  if (!answer?.ok) throw new Error(`${name}: ${answer ? `the server responded with status ${answer.status}` : "the server does not respond"}`);
  const bytes = new Uint8Array(await answer.arrayBuffer());
  if (digest && globalThis.crypto?.subtle) {
    const found = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
    const text = Array.from(found, (byte) => byte.toString(16).padStart(2, "0")).join("");
    if (text !== digest) throw new Error(`${name}: expected the exported file, found another one; export the run again`);
  }
  return bytes;
}
