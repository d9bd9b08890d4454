// What a screen reader is told without being asked: changes of phase and ends of acts, not every figure.

let last = "";

export function announce(sentence) {
  if (sentence === last) return;
  last = sentence;
  document.getElementById("announcements").textContent = sentence;
}
