// The colours of lanes: neighbours differ, and each lane keeps its own in every picture. A number stands beside the
// colour wherever there is room, and in the table always.

const GOLDEN = 137.508;

/** Of a lane: a hue by its number; the page is dark or light. */
export function laneColour(lane, isDark) {
  const hue = (lane * GOLDEN + 195) % 360;
  return `hsl(${hue.toFixed(0)} ${isDark ? "52% 46%" : "58% 68%"})`;
}

/** [0, 1, 2, 7] → "0–2, 7". */
export function laneWords(lanes) {
  const parts = [];
  for (let at = 0; at < lanes.length; ) {
    let end = at;
    while (end + 1 < lanes.length && lanes[end + 1] === lanes[end] + 1) end += 1;
    parts.push(end > at ? `${lanes[at]}–${lanes[end]}` : `${lanes[at]}`);
    at = end + 1;
  }
  return parts.join(", ");
}
