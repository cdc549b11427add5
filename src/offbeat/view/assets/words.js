// Numbers as a person would say them; the same words as in offbeat's tables.

export function count(value) {
  return value.toLocaleString("en-US", { maximumFractionDigits: 0 });
}

export function figure(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1000) return count(value);
  if (size !== 0 && size < 0.001) return value.toExponential(2);
  return Number.isInteger(value) ? String(value) : value.toPrecision(3);
}

export function percent(share) {
  if (share === null || share === undefined) return "–";
  if (share > 0 && share < 0.005) return "< 1 %";
  return `${Math.round(100 * share)} %`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 100) return `${count(value)} s`;
  if (value >= 1) return `${value.toFixed(1)} s`;
  return value >= 0.1 ? `${Math.round(1000 * value)} ms` : `${(1000 * value).toFixed(1)} ms`;
}

export function duration(value) {
  if (value < 120) return `${value.toFixed(0)} s`;
  const minutes = Math.floor(value / 60);
  return minutes < 120 ? `${minutes} min ${Math.floor(value % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}
