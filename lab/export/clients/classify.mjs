// Classifies sentences with an exported folder, one line of JSON each: node classify.mjs DIR [--threshold .9] < sentences.txt
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { parseArgs } from "node:util";
import { Tokenizer } from "@huggingface/tokenizers";
import * as ort from "onnxruntime-node";

const fail = (message) => (console.error(message), process.exit(2));
process.on("uncaughtException", (error) => fail(error.message));
const { positionals, values } = parseArgs({ allowPositionals: true, options: { threshold: { type: "string" } } });
if (positionals.length !== 1) fail("expected one folder: node classify.mjs DIR [--threshold .9] < sentences.txt");
const [folder] = positionals;
const read = (name) => JSON.parse(readFileSync(join(folder, name), "utf8"));
const manifest = read("manifest.json");
const isSupported = manifest.unit === "rows" && manifest.task.texts === 1 && manifest.rule_in_graph !== false;
if (!isSupported) fail(`${folder}: expected a classifier of single sentences with its rule in the graph`);

// onnxruntime-node ignores values for inputs with a default; model_web.onnx has no defaults.
const hasThreshold = values.threshold !== undefined;
const graph = hasThreshold ? "onnx/model_web.onnx" : "onnx/model.onnx";
if (!(graph in manifest.files)) fail(`${folder}: has no ${graph}; export the run again with --web`);
const session = await ort.InferenceSession.create(join(folder, graph), { logSeverityLevel: 3 });
const tokenizer = new Tokenizer(read("tokenizer.json"), {});
const left = read("tokenizer.json").truncation?.direction === "Left";
if (hasThreshold && !(values.threshold.trim() && Number(values.threshold) <= Infinity)) fail("--threshold: expected a number");
if (hasThreshold && !session.inputNames.includes("threshold")) fail("--threshold: this graph's rule has none; leave it out");
const int64 = (numbers, shape = [numbers.length]) => new ort.Tensor("int64", BigInt64Array.from(numbers, BigInt), shape);

function settings() {
  const { patience } = read("web.json").settings; // of a rule that counts exits: the run's own
  const counted = patience && { patience: int64(patience.values) };
  const threshold = new ort.Tensor("float32", [Number(values.threshold)], []); // for all exits; [rows, exits - 1]: by row
  return { threshold, exit_at: int64([-1]), ...counted };
}
const overrides = hasThreshold ? settings() : {};

/** Token ids, cut to the length that the model was trained with, on the side that tokenizer.json names. */
function encode(text) {
  const after = tokenizer.post_processor ?? ((tokens) => ({ tokens }));
  const room = manifest.max_length - after([], null).tokens.length;
  const words = tokenizer.tokenize(text, { add_special_tokens: false });
  const { tokens } = after(left ? words.slice(-room) : words.slice(0, room), null);
  return tokens.map((token) => tokenizer.token_to_id(token) ?? tokenizer.model.unk_token_id);
}

async function classify(text) {
  const ids = encode(text);
  const row = (numbers) => int64(numbers, [1, ids.length]);
  const inputs = { input_ids: row(ids), attention_mask: row(ids.map(() => 1)), token_type_ids: row(ids.map(() => 0)) };
  const known = Object.entries(inputs).filter(([name]) => session.inputNames.includes(name));
  const { label, confidence, layers } = await session.run({ ...Object.fromEntries(known), ...overrides });
  const name = manifest.task.label_names[Number(label.data[0])] ?? label.data[0];
  return { label: name, confidence: confidence?.data[0], layers: Number(layers.data[0]) };
}

for await (const line of createInterface({ input: process.stdin })) {
  if (line.trim()) console.log(JSON.stringify(await classify(line)));
}
