// What a rule looks at, in words. The graph decides; this only tells of it.

const INFINITIES = { inf: Infinity, "-inf": -Infinity }; // as JSON writes them

/** A number of web.json, where infinities are strings. */
export const number = (value) => INFINITIES[value] ?? value;

const sum = (values) => values.reduce((total, value) => total + value, 0);
const sorted = (values) => [...values].sort((a, b) => b - a);
const entropy = (odds) => -sum(odds.map((p) => (p > 0 ? p * Math.log(p) : 0)));

function softmax(logits) {
  const powers = logits.map((logit) => Math.exp(logit - Math.max(...logits)));
  return powers.map((power) => power / sum(powers));
}

const MEASURES = {
  max_probability: ["the probability", (logits) => Math.max(...softmax(logits))],
  entropy: ["minus the entropy", (logits) => -entropy(softmax(logits))],
  normalised_entropy: ["minus the normalised entropy", (logits) => -entropy(softmax(logits)) / Math.log(logits.length)],
  breaking_ties: ["the lead in probability", (logits) => lead(softmax(logits))],
  breaking_ties_logits: ["the lead in logits", (logits) => lead(logits)],
  saturation: ["its likeness to the state at the exit before"], // of a decoder's states, which no logits tell
};

function lead(values) {
  const [first, second] = sorted(values);
  return first - second;
}

/** Three digits, more where the number is close to a whole one, which it must not seem to be. */
export function digits(value) {
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "-∞";
  const places = [3, 4, 5, 6].find((count) => Number(value.toFixed(count)) % 1 !== 0) ?? 3;
  return Number.isInteger(value) ? String(value) : value.toFixed(places);
}

/** How many exits in a row, up to exit k, did what `holds` asks of an exit and the one before it. */
function streak(exits, k, holds) {
  let count = 0;
  while (k - count >= 0 && holds(exits[k - count], exits[k - count - 1])) count++;
  return count;
}

const times = (count) => (count === 1 ? "once" : `${count} times`);

/** The rule with its settings, in a sentence. */
export function shown({ unit, rule, exits }, settings) {
  const it = unit === "tokens" ? "A token" : "It";
  const bars = (settings.threshold?.values ?? []).map(number);
  const bar = bars.every((each) => each === bars[0]) ? digits(bars[0] ?? 0) : `${bars.map(digits).join(", ")} (exit by exit)`;
  const measure = MEASURES[rule.measure]?.[0];
  const patience = settings.patience?.values[0];
  const sayings = {
    threshold: () => `${it} leaves at the first exit where ${measure} is at least ${bar}.`,
    patience: () => `${it} leaves when the same was said again ${times(patience)} in a row.`,
    "patience-confidence": () => `${it} leaves when ${measure} was at least ${bar} ${times(patience)} in a row.`,
    policy: () => `${it} leaves at the first exit where its policy’s logit is above ${bar}.`,
    "q-exit": () => `${it} leaves once the chances to leave so far add up to more than ${bar} (-ln of not having left).`,
    adainfer: () => `${it} leaves at the first exit where a classifier of probability and lead says more than ${bar}.`,
    fixed: () => `${it} always leaves after layer ${exits[rule.exit]}.`,
    never: () => `${it} never leaves early: this is the full model.`,
  };
  return sayings[rule.name]?.() ?? `${it} leaves where the rule ${rule.name} says so.`; // of a method of one's own
}

/** The probability that exit k must reach; undefined where the rule asks for something else. */
export function probabilityAsked({ rule }, settings, k) {
  const asked = rule.measure === "max_probability" ? settings.threshold?.values[k] : undefined;
  return asked === undefined ? undefined : number(asked);
}

/** Why it went on at exit k, or left there. said: what each exit says. */
export function why({ rule, exits }, settings, said, k, left) {
  const then = left ? "it leaves" : "it goes on";
  if (k === exits.length - 1) return "the last exit takes whoever is left";
  const bar = number(settings.threshold?.values[k]);
  const [name, measure] = MEASURES[rule.measure] ?? [];
  const against = (value, isAbove, sign, not) => `${digits(value)} ${isAbove ? sign : not} ${digits(bar)}`;
  if (rule.name === "threshold") {
    return `${name} is ${against(measure(said[k].logits), left, "≥", "<")}: ${then}`;
  }
  if (rule.name === "policy") return `the policy’s logit is ${against(said[k].exitLogit, left, ">", "≤")}: ${then}`;
  if (rule.name === "q-exit") {
    const soFar = sum(said.slice(0, k + 1).map(({ exitLogit }) => Math.log1p(Math.exp(exitLogit))));
    return `the chances to leave so far add up to ${against(soFar, left, ">", "≤")}: ${then}`;
  }
  if (rule.name === "adainfer") {
    const odds = softmax(said[k].logits);
    const decision = rule.gap[k] * lead(odds) + rule.top[k] * Math.max(...odds) + rule.bias[k];
    return `the classifier says ${against(decision, left, ">", "≤")}: ${then}`;
  }
  if (rule.name === "patience") {
    const near = (one, other) => Math.abs(one - other) < rule.tolerance;
    const same = (one, other) => other && (one.label === other.label || (said[0].logits.length === 1 && near(one.label, other.label)));
    return `the same again ${streak(said, k, same)} of ${settings.patience.values[0]} times: ${then}`;
  }
  if (rule.name === "patience-confidence") {
    const sure = streak(said, k, (exit) => exit && measure(exit.logits) >= bar);
    return `sure ${sure} of ${settings.patience.values[0]} times: ${then}`;
  }
  if (!["fixed", "never"].includes(rule.name)) return `the rule ${rule.name} says so: ${then}`;
  return left ? "the rule says so before it reads" : "passed unread";
}
