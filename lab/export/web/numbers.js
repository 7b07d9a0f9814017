// Numbers in web.json, and how the page shows them.

const INFINITIES = { inf: Infinity, "-inf": -Infinity }; // as JSON writes them

/** A number of web.json, where infinities are strings. */
export const number = (value) => INFINITIES[value] ?? value;

/** Three decimals, or more if the number would look like an integer. */
export function digits(value) {
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "-∞";
  const places = [3, 4, 5, 6].find((count) => Number(value.toFixed(count)) % 1 !== 0) ?? 3;
  return Number.isInteger(value) ? String(value) : value.toFixed(places);
}
