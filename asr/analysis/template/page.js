"use strict";
// The list of utterances: searched, filtered, sorted and drawn in pages, so that a large split opens
// fast. Text from transcripts and file names becomes only text nodes and values.
const AT_ONCE = 50;
const byId = (id) => document.getElementById(id);
const utterances = JSON.parse(byId("data").textContent);
const order = new Intl.Collator(undefined, { numeric: true });
let confusion = null; // [mark, reference word, hypothesis word] or none
let matches = utterances;
let drawn = 0;

// Spaces do not count in a search: scripts without them have some here, between words with errors.
function searched(text) {
  return text.toLowerCase().replace(/\s+/g, "");
}

for (const [position, utterance] of utterances.entries()) {
  const texts = [utterance.id, utterance.speaker];
  for (const side of [1, 2]) {
    texts.push(utterance.edits.map((edit) => edit[side]).join(""));
  }
  utterance.text = texts.map(searched).join("\n");
  utterance.position = position;
  utterance.errors = utterance.S + utterance.D + utterance.I;
  utterance.rate = utterance.errors / Math.max(utterance.words, 1);
}

const sorts = {
  errors: (a, b) => b.errors - a.errors || b.rate - a.rate || a.position - b.position,
  rate: (a, b) => b.rate - a.rate || b.errors - a.errors || a.position - b.position,
  words: (a, b) => b.words - a.words || a.position - b.position,
  id: (a, b) => order.compare(a.id, b.id),
  position: (a, b) => a.position - b.position,
};

const shows = {
  all: () => true,
  wrong: (utterance) => utterance.errors > 0,
  right: (utterance) => utterance.errors === 0,
  S: (utterance) => utterance.S > 0,
  D: (utterance) => utterance.D > 0,
  I: (utterance) => utterance.I > 0,
};

function element(tag, classes, ...children) {
  const made = document.createElement(tag);
  if (classes) made.className = classes;
  made.append(...children);
  return made;
}

function isConfused(edit) {
  return confusion.every((part, side) => edit[side] === part);
}

function refresh() {
  const text = searched(byId("find").value);
  const chosen = byId("speaker").selectedIndex - 1; // the first stands for all
  const speaker = chosen < 0 ? null : speakers[chosen];
  const shown = byId("show").value;
  const flag = shown.startsWith("flag:") ? shown.slice(5) : null;
  const show = flag === null ? shows[shown] : (utterance) => utterance.flags.includes(flag);
  matches = utterances.filter(
    (utterance) =>
      show(utterance) &&
      (speaker === null || utterance.speaker === speaker) &&
      utterance.text.includes(text) &&
      (confusion === null || utterance.edits.some(isConfused)),
  );
  matches.sort(sorts[byId("sort").value]);
  byId("utterances").replaceChildren();
  drawn = 0;
  draw();
}

function draw() {
  const next = matches.slice(drawn, drawn + AT_ONCE);
  byId("utterances").append(...next.map(item));
  drawn += next.length;
  const rest = matches.length - drawn;
  byId("count").textContent =
    `${matches.length} of ${utterances.length} utterances` + (rest ? `, the first ${drawn} shown` : "");
  byId("more").textContent = `Show ${Math.min(rest, AT_ONCE)} more`;
  byId("more").hidden = rest === 0;
  byId("confusion").hidden = confusion === null;
  if (confusion) byId("confusion").textContent = `${spell(confusion)} \u00d7`;
}

function spell([mark, reference, hypothesis]) {
  if (mark === "S") return `${reference} \u2192 ${hypothesis}`;
  return mark === "D" ? `${reference} deleted` : `${hypothesis} inserted`;
}

function item(utterance) {
  const made = element("li", "", head(utterance), words(utterance));
  if (utterance.audio) made.append(player(utterance));
  if (utterance.picture) made.append(picture(utterance));
  return made;
}

function head(utterance) {
  const { errors, words: size, rate } = utterance;
  const wrong = errors
    ? `${errors} ${errors === 1 ? "error" : "errors"} in ${size}, ${(100 * rate).toFixed(1)} %`
    : "no errors";
  const parts = [element("strong", "", utterance.id)];
  if (utterance.speaker) parts.push(element("span", "", utterance.speaker));
  parts.push(...utterance.flags.map((flag) => element("span", "flag", flag)));
  return element("p", "head", ...parts, element("span", "sum", wrong));
}

function words(utterance) {
  const line = element("p", "words");
  line.dir = "auto"; // Arabic and Hebrew from the right
  for (const edit of utterance.edits) line.append(pair(edit), " ");
  if (!utterance.edits.length) line.append(element("span", "empty", "empty reference, empty hypothesis"));
  return line;
}

function pair([mark, reference, hypothesis]) {
  if (mark === "C") return reference;
  const made = element("span", "pair");
  made.title = spell([mark, reference, hypothesis]);
  if (reference) made.append(element("del", mark, reference));
  if (hypothesis) made.append(element("ins", mark, hypothesis));
  return made;
}

function player(utterance) {
  const made = element("audio");
  made.controls = true;
  made.preload = "none";
  made.src = utterance.audio;
  made.setAttribute("aria-label", `audio of ${utterance.id}`);
  made.addEventListener("error", () => {
    made.replaceWith(element("p", "empty", `cannot play ${decodeURIComponent(utterance.audio)}`));
  });
  return made;
}

function picture(utterance) {
  const image = element("img");
  image.alt = `attention of ${utterance.id}: tokens of the hypothesis against seconds of audio`;
  const made = element("details", "picture", element("summary", "", "Attention"), image);
  // Loaded only when opened.
  made.addEventListener("toggle", () => (image.src = utterance.picture), { once: true });
  return made;
}

const speakers = [...new Set(utterances.map((utterance) => utterance.speaker))].sort(order.compare);
byId("speaker").append(...speakers.map((name) => element("option", "", name || "(no name)")));
byId("speaker").parentElement.hidden = speakers.length === 1 && !speakers[0];

function choose(event) {
  const button = event.target.closest("td button");
  if (!button) return;
  if (button.dataset.speaker !== undefined) {
    byId("speaker").selectedIndex = speakers.indexOf(button.dataset.speaker) + 1;
  } else {
    confusion = [button.dataset.mark, button.dataset.reference, button.dataset.hypothesis];
  }
  refresh();
  byId("controls").scrollIntoView({ block: "nearest" });
}

document.querySelector("aside").addEventListener("click", choose);
byId("controls").addEventListener("input", refresh);
byId("controls").addEventListener("submit", (event) => event.preventDefault());
byId("more").addEventListener("click", draw);
byId("confusion").addEventListener("click", () => {
  confusion = null;
  refresh();
});
if (matchMedia("(max-width: 62rem)").matches) {
  for (const part of document.querySelectorAll("aside details")) part.open = false;
}
byId("controls").hidden = false;
refresh();
