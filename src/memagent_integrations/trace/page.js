"use strict";
const byId = (id) => document.getElementById(id);
const number = (value) => (value === null || value === undefined ? "unknown" : value.toLocaleString("en"));
const element = (name, text, kind) => {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  return made;
};
const memory = (step) => step.diff.filter(([sign]) => sign >= 0).map(([, text]) => text).join("");
let reading, memories, items, current, shown;
let whenShown = (place, focus) => { if (focus) history.replaceState(null, "", `#${place + 1}`); };

function load(made) {
  reading = { ...made, steps: [] };
  [memories, items, shown, current] = [[], [], [], -1];
  byId("steps").replaceChildren();
  byId("step").replaceChildren();
  append(made.steps);
  head();
}

function append(steps) {
  for (const step of steps) {
    const place = items.length;
    const button = element("button");
    const changes = step.diff.filter(([sign]) => sign).length;
    button.append(element("span", `Chunk ${place + 1}`), element("span", step.edited ? "edited" : step.cut ? `${step.outcome}, cut` : step.outcome, `badge ${step.cut ? "cut" : step.outcome}`));
    button.append(element("small", changes ? `${changes} change${changes > 1 ? "s" : ""}` : "the same memory"));
    button.addEventListener("click", () => show(place, true));
    const item = element("li");
    item.append(button);
    reading.steps.push(step);
    memories.push(memory(step).toLowerCase());
    items.push(item);
  }
  byId("steps").append(...items.slice(items.length - steps.length));
  find();
}

function head() {
  document.title = reading.question.slice(0, 80);
  byId("question").textContent = reading.question;
  byId("answer").textContent = reading.error || reading.answer;
  byId("answer").classList.toggle("error", Boolean(reading.error));
  const [prompt, written, cached] = reading.tokens;
  byId("totals").textContent =
    `${reading.model} · ${number(reading.steps.length)} chunks · tokens: ${number(prompt)} read, ${number(written)} written, ${number(cached)} from the cache · ${reading.seconds.toFixed(1)} s in the model`;
  byId("sentences").replaceChildren(...reading.sentences.map(({ text, step }) => {
    const place = reading.steps.findIndex((each) => each.index === step);
    const link = element("a", `chunk ${place + 1}`);
    link.href = `#${place + 1}`;
    const item = element("li", `${text} `);
    item.append(link);
    return item;
  }));
  byId("origins").hidden = !reading.sentences.length;
}

function facts(step) {
  const list = element("dl", undefined, "facts");
  const add = (name, value) => list.append(element("dt", name), element("dd", value));
  if (step.span) add("chunk", `characters ${number(step.span[0])} to ${number(step.span[1])}, ${number(step.span[2])} tokens`);
  for (const [name, start, end] of step.sources) add("source", `${name}, characters ${number(start)} to ${number(end)}`);
  add("tokens", `${number(step.tokens[0])} read, ${number(step.tokens[1])} written, ${number(step.tokens[2])} from the cache`);
  add("time", `${step.seconds.toFixed(1)} s`);
  add("memory", `${step.outcome}${step.edited ? " by a person" : ""}${step.cut ? ", cut to its limit" : ""}${step.finish ? ` (model ended with: ${step.finish})` : ""}`);
  return list;
}

function marked(text, wanted) {
  if (!wanted) return [document.createTextNode(text)];
  const parts = [];
  const low = text.toLowerCase();
  let from = 0;
  for (let at = low.indexOf(wanted); at >= 0; at = low.indexOf(wanted, from)) {
    parts.push(document.createTextNode(text.slice(from, at)), element("mark", text.slice(at, at + wanted.length)));
    from = at + wanted.length;
  }
  parts.push(document.createTextNode(text.slice(from)));
  return parts;
}

const wanted = () => byId("search").value.trim().toLowerCase();

function show(place, focus) {
  current = place;
  const step = reading.steps[place];
  const text = element("pre", undefined, "memory");
  for (const [sign, words] of step.diff) {
    const part = element(sign > 0 ? "ins" : sign < 0 ? "del" : "span");
    part.append(...marked(words, wanted()));
    text.append(part);
  }
  if (!step.diff.length) text.textContent = "(empty)";
  const article = byId("step");
  article.replaceChildren(element("h2", `Memory after chunk ${place + 1}`), facts(step), text);
  if (step.reply !== null) article.append(element("h2", "The reply, of which nothing was kept"), element("pre", step.reply || "(empty)", "memory"));
  items.forEach((item, other) => {
    if (other === place) item.firstChild.setAttribute("aria-current", "step");
    else item.firstChild.removeAttribute("aria-current");
  });
  const height = scrollY;
  items[place].scrollIntoView({ block: "nearest" });
  scrollTo(scrollX, height); // the list moves, the page does not
  whenShown(place, focus);
}

function find() {
  shown = memories.flatMap((text, place) => (text.includes(wanted()) ? [place] : []));
  const visible = new Set(shown);
  items.forEach((item, place) => { item.hidden = !visible.has(place); });
  byId("none").hidden = shown.length > 0 || !items.length;
}

function search() {
  find();
  if (shown.length) show(shown.includes(current) ? current : shown[0]);
}

function move(by) {
  const place = shown.indexOf(current) + by;
  if (place >= 0 && place < shown.length) show(shown[place], true);
}

byId("search").addEventListener("input", search);
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const searching = document.activeElement === byId("search");
  if (event.key === "Escape" && searching) { byId("search").value = ""; search(); byId("search").blur(); return; }
  if (searching ? !["ArrowDown", "ArrowUp"].includes(event.key) : document.activeElement.matches("input, textarea, select")) return;
  const keys = { j: 1, ArrowDown: 1, ArrowRight: 1, k: -1, ArrowUp: -1, ArrowLeft: -1 };
  if (event.key in keys) { event.preventDefault(); move(keys[event.key]); }
  else if (event.key === "/") { event.preventDefault(); byId("search").focus(); }
  else if (event.key === "d") document.body.classList.toggle("plain");
});
const open = () => {
  const place = Number(location.hash.slice(1)) - 1;
  if (reading && reading.steps.length) show(place >= 0 && place < reading.steps.length ? place : reading.steps.length - 1);
};
window.addEventListener("hashchange", open);
if (byId("data")) {
  load(JSON.parse(byId("data").textContent));
  open();
}
