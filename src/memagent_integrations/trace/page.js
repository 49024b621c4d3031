"use strict";
const byId = (id) => document.getElementById(id);
const number = (value) => (value === null || value === undefined ? "unknown" : value.toLocaleString("en"));
const element = (name, text, className) => {
  const node = document.createElement(name);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  return node;
};
const memory = (step) => step.diff.filter(([sign]) => sign >= 0).map(([, text]) => text).join("");
// the reading; for each step, its memory in lower case and its list item; the step on the page; the steps that match
let reading, memories, items, current, shown;
let whenShown = (position, focus) => { if (focus) history.replaceState(null, "", `#${position + 1}`); };
let linkedStep = () => Number(location.hash.slice(1)) - 1;

function load(newReading) {
  reading = { ...newReading, steps: [] };
  [memories, items, shown, current] = [[], [], [], -1];
  byId("steps").replaceChildren();
  byId("step").replaceChildren();
  append(newReading.steps);
  head();
}

function append(steps) {
  for (const step of steps) {
    const position = items.length;
    const button = element("button");
    const changes = step.diff.filter(([sign]) => sign).length;
    const outcome = step.edited ? "edited" : step.cut ? `${step.outcome}, cut` : step.outcome;
    button.append(element("span", `Chunk ${position + 1}`));
    button.append(element("span", outcome, `badge ${step.cut ? "cut" : step.outcome}`));
    button.append(element("small", changes ? `${changes} change${changes > 1 ? "s" : ""}` : "the same memory"));
    button.addEventListener("click", () => show(position, true));
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
  byId("warnings").replaceChildren(...reading.warnings.map((warning) => element("li", `Warning: ${warning}`)));
  byId("totals").textContent = [
    reading.model,
    `${number(reading.steps.length)} chunks`,
    `tokens: ${tokens(reading.tokens)}`,
    `${reading.seconds.toFixed(1)} s in the model`,
  ].join(" · ");
  byId("statements").replaceChildren(...reading.statements.map(({ text, places }) => {
    const item = element("li", text);
    const list = element("ul", undefined, "places");
    list.append(...places.map(place));
    if (!places.length) list.append(element("li", "no passage found"));
    item.append(list);
    return item;
  }));
  byId("origins").hidden = !reading.statements.length;
}

function place([step, name, page, start, end]) {
  const position = reading.steps.findIndex((each) => each.index === step);
  const link = element("a", `chunk ${position + 1}`);
  link.href = `#${position + 1}`;
  const item = element("li");
  item.append(link, `: ${source(name, page, start, end)}`);
  return item;
}

const characters = (start, end) => `characters ${number(start)} to ${number(end)}`;

function source(name, page, start, end) {
  const place = page === null ? name : `${name.replace(/#page=[^#]*$/, "")}, page ${page}`; // the id names it too
  return `${place}, ${characters(start, end)}`;
}

function tokens([prompt, written, cached]) {
  return `${number(prompt)} read, ${number(written)} written, ${number(cached)} from the cache`;
}

function facts(step) {
  const list = element("dl", undefined, "facts");
  const add = (name, value) => list.append(element("dt", name), element("dd", value));
  if (step.span) add("chunk", `${characters(step.span[0], step.span[1])}, ${number(step.span[2])} tokens`);
  for (const each of step.sources) add("source", source(...each));
  add("tokens", tokens(step.tokens));
  add("time", `${step.seconds.toFixed(1)} s`);
  const outcome = `${step.outcome}${step.edited ? " by a person" : ""}${step.cut ? ", cut to its limit" : ""}`;
  add("memory", step.finish ? `${outcome} (model ended with: ${step.finish})` : outcome);
  return list;
}

// The text as nodes, with what was searched for highlighted.
function marked(text, query) {
  if (!query) return [document.createTextNode(text)];
  const parts = [];
  const lower = text.toLowerCase();
  let from = 0;
  for (let at = lower.indexOf(query); at >= 0; at = lower.indexOf(query, from)) {
    parts.push(document.createTextNode(text.slice(from, at)), element("mark", text.slice(at, at + query.length)));
    from = at + query.length;
  }
  parts.push(document.createTextNode(text.slice(from)));
  return parts;
}

const searchQuery = () => byId("search").value.trim().toLowerCase();

function show(position, focus) {
  current = position;
  const step = reading.steps[position];
  const text = element("pre", undefined, "memory");
  for (const [sign, words] of step.diff) {
    const part = element(sign > 0 ? "ins" : sign < 0 ? "del" : "span");
    part.append(...marked(words, searchQuery()));
    text.append(part);
  }
  if (!step.diff.length) text.textContent = "(empty)";
  const article = byId("step");
  article.replaceChildren(element("h2", `Memory after chunk ${position + 1}`), facts(step), text);
  if (step.reply !== null) {
    article.append(element("h2", "The reply, of which nothing was kept"));
    article.append(element("pre", step.reply || "(empty)", "memory"));
  }
  items.forEach((item, other) => {
    if (other === position) item.firstChild.setAttribute("aria-current", "step");
    else item.firstChild.removeAttribute("aria-current");
  });
  const height = scrollY;
  items[position].scrollIntoView({ block: "nearest" });
  scrollTo(scrollX, height); // the list moves, the page does not
  whenShown(position, focus);
}

function find() {
  const query = searchQuery();
  shown = memories.flatMap((text, position) => (text.includes(query) ? [position] : []));
  const visible = new Set(shown);
  items.forEach((item, position) => { item.hidden = !visible.has(position); });
  byId("none").hidden = shown.length > 0 || !items.length;
}

function search() {
  find();
  if (shown.length) show(shown.includes(current) ? current : shown[0]);
}

function move(by) {
  const next = shown.indexOf(current) + by;
  if (next >= 0 && next < shown.length) show(shown[next], true);
}

byId("search").addEventListener("input", search);
document.addEventListener("keydown", (event) => {
  if (!reading || event.ctrlKey || event.metaKey || event.altKey) return;
  const searching = document.activeElement === byId("search");
  if (event.key === "Escape" && searching) {
    byId("search").value = "";
    search();
    byId("search").blur();
    return;
  }
  const typing = searching
    ? !["ArrowDown", "ArrowUp"].includes(event.key)
    : document.activeElement.matches("input, textarea, select");
  if (typing) return;
  const keys = { j: 1, ArrowDown: 1, ArrowRight: 1, k: -1, ArrowUp: -1, ArrowLeft: -1 };
  if (event.key in keys) { event.preventDefault(); move(keys[event.key]); }
  else if (event.key === "/") { event.preventDefault(); byId("search").focus(); }
  else if (event.key === "d") document.body.classList.toggle("plain");
});

// Show the step that the address names, or else the last one.
const open = () => {
  if (!reading || !reading.steps.length) return;
  const position = linkedStep();
  const last = reading.steps.length - 1;
  show(position >= 0 && position <= last ? position : last);
};
window.addEventListener("hashchange", open);
if (byId("data")) {
  load(JSON.parse(byId("data").textContent));
  open();
}
