
// The leaderboard: `page.js` shows a reading; this script lists the samples of a group and opens the one that is chosen.
// The address says what is shown: #g3 is the fourth group, #g3/17 its sample 17, #g3/17/2 its second chunk.
const MOST_PAIRS = 1e6; // of words to compare; beyond, all between the equal ends of two memories counts as different
const title = document.title;
const views = ["board", "samples", "reading"].map(byId);
const address = () => location.hash.slice(1).split("/");
let group = null; // the group in the list, and its number; the sample that is open, as group/sample
let listed, opened;
let left = 0; // where the board was scrolled to

// The words of both texts as [sign, words], as Python's `changes.difference` gives them.
function difference(old, latest) {
  const split = (text) => text.match(/\S+\s*|\s+/g) || [];
  const [a, b] = [split(old), split(latest)];
  const [before, after] = [a, b].map((words) => words.map((word) => word.trim()));
  let [start, aEnd, bEnd] = [0, a.length, b.length];
  while (start < aEnd && start < bEnd && before[start] === after[start]) start += 1;
  while (aEnd > start && bEnd > start && before[aEnd - 1] === after[bEnd - 1]) [aEnd, bEnd] = [aEnd - 1, bEnd - 1];
  const parts = [];
  const add = (sign, words) => {
    if (parts.length && parts.at(-1)[0] === sign) parts.at(-1)[1] += words;
    else if (words) parts.push([sign, words]);
  };
  add(0, b.slice(0, start).join(""));
  const width = bEnd - start + 1;
  const pairs = (aEnd - start + 1) * width;
  const common = new Uint16Array(pairs <= MOST_PAIRS ? pairs : 0); // the most words that what follows both has in common
  const at = (i, j) => (i - start) * width + j - start;
  for (let i = common.length ? aEnd - 1 : -1; i >= start; i--) {
    for (let j = bEnd - 1; j >= start; j--) {
      const skipped = Math.max(common[at(i + 1, j)], common[at(i, j + 1)]);
      common[at(i, j)] = before[i] === after[j] ? common[at(i + 1, j + 1)] + 1 : skipped;
    }
  }
  for (let [i, j] = [start, start]; i < aEnd || j < bEnd;) {
    if (common.length && i < aEnd && j < bEnd && before[i] === after[j]) [i, j] = [i + 1, (add(0, b[j]), j + 1)];
    else if (j === bEnd || (i < aEnd && (!common.length || common[at(i + 1, j)] >= common[at(i, j + 1)]))) add(-1, a[i++]);
    else add(1, b[j++]);
  }
  add(0, b.slice(bEnd).join(""));
  return parts;
}

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
}

function see(name) {
  if (!byId("board").hidden) left = scrollY;
  for (const view of views) view.hidden = view.id !== name;
  scrollTo(0, name === "board" ? left : 0);
}

const link = (text, target) => {
  const node = element("a", text);
  node.href = `#${target}`;
  return node;
};
const named = () => `${group.task} · ${group.length ? number(group.length) : "all lengths"} · ${group.reader}`;

function list(name) {
  if (listed === name) return;
  group = JSON.parse(byId(name).textContent);
  listed = name;
  byId("group").textContent = named();
  byId("list").replaceChildren(...group.samples.map(([sample, score, ...texts]) => {
    const row = element("tr");
    const first = element("td");
    first.append(link(number(sample), `${name}/${sample}`));
    row.append(first, element("td", String(Math.round(1000 * score) / 10)));
    row.append(...texts.slice(0, -1).map((text) => element("td", text)));
    return row;
  }));
  for (const head of document.querySelectorAll("#samples th")) head.removeAttribute("aria-sort");
}

async function openSample(name, sample) {
  const row = group.samples.find((each) => String(each[0]) === sample);
  if (!row) return;
  const whole = await unpacked(row.at(-1));
  if (address()[0] !== name || address()[1] !== sample) return; // another one was chosen meanwhile
  let before = "";
  for (const step of whole.steps) {
    step.diff = difference(before, step.memory);
    before = step.memory;
  }
  opened = `${name}/${sample}`;
  see("reading");
  load(whole);
  [byId("up").href, byId("up").textContent] = [`#${name}`, named()];
  byId("question").tabIndex = -1;
  byId("question").focus();
  document.querySelector("#reading nav").hidden = !whole.steps.length;
  if (!whole.steps.length) byId("step").append(element("p", "There is no memory: this reader has none, or it failed."));
  byId("verdict")?.remove();
  byId("answer").after(verdict(whole));
  open();
}

function verdict(whole) {
  const box = element("dl", undefined, "facts");
  box.id = "verdict";
  const add = (name, value) => {
    const cell = element("dd");
    cell.append(...(Array.isArray(value) ? value : [value]));
    box.append(element("dt", name), cell);
  };
  add("gold", whole.golds.join(" | "));
  add("score", `${Math.round(1000 * whole.score) / 10} %${whole.cause ? `: ${whole.cause}` : ""}`);
  for (const [text, read, noted, lost, answered] of whole.facts) {
    const chunk = (index) => {
      const position = whole.steps.findIndex((step) => step.index === index) + 1;
      return link(`chunk ${position}`, `${opened}/${position}`);
    };
    const history = [["read in ", read], ["noted in ", noted], ["lost in ", lost]]
      .flatMap(([word, index], place) => (index === null ? [] : [`${place ? ", " : ""}${word}`, chunk(index)]));
    const end = answered === null ? "" : `, ${answered ? "" : "not "}in the answer`;
    add("fact", [`${text} `, element("br"), ...(history.length ? [...history, end] : [])]);
  }
  for (const [name, value] of Object.entries(whole.details)) add(name.replaceAll("_", " "), value);
  return box;
}

async function follow() {
  const [name, sample] = address();
  const known = /^g\d+$/.test(name) && byId(name);
  if (known) list(name);
  if (known && sample && opened === `${name}/${sample}` && !byId("reading").hidden) return; // page.js shows its step
  reading = opened = null;
  if (known && sample) return openSample(name, sample);
  document.title = known ? named() : title;
  see(known ? "samples" : "board");
  if (known) byId("group").focus();
}

linkedStep = () => Number(address()[2]) - 1;
whenShown = (position, focus) => { if (focus) history.replaceState(null, "", `#${opened}/${position + 1}`); };
window.addEventListener("hashchange", follow);

const figure = (row, column) => {
  const text = row.cells[column].textContent.trim();
  const value = parseFloat(text.replaceAll(",", ""));
  return Number.isNaN(value) ? text : value;
};

function sort(head, column) {
  const body = head.closest("table").tBodies[0];
  const descending = head.ariaSort ? head.ariaSort === "ascending" : typeof figure(body.rows[0], column) === "number";
  const compare = (a, b) => {
    if (a === "" || b === "") return (a === "") - (b === ""); // what is not known comes last
    const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en");
    return descending ? -order : order;
  };
  for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
  head.ariaSort = descending ? "descending" : "ascending";
  body.append(...[...body.rows].sort((a, b) => compare(figure(a, column), figure(b, column))));
}

for (const head of document.querySelectorAll(".sortable th")) {
  const button = element("button", head.textContent);
  button.type = "button";
  button.addEventListener("click", () => sort(head, head.cellIndex));
  head.replaceChildren(button);
}

function filter() {
  const chosen = ["task", "reader"].map((kind) => [kind, byId(`by-${kind}`).value]);
  for (const node of document.querySelectorAll("#board [data-task], #board [data-reader]")) {
    node.hidden = chosen.some(([kind, value]) => value && node.dataset[kind] !== undefined && node.dataset[kind] !== value);
  }
}

for (const kind of ["task", "reader"]) {
  const names = new Set([...document.querySelectorAll(`#board [data-${kind}]`)].map((node) => node.dataset[kind]));
  const choice = element("select");
  choice.id = `by-${kind}`;
  choice.append(...["", ...names].map((name) => {
    const option = element("option", name || `all ${kind}s`);
    option.value = name;
    return option;
  }));
  choice.setAttribute("aria-label", `Show the ${kind}`);
  choice.addEventListener("change", filter);
  byId("filters").append(choice);
}
follow();
