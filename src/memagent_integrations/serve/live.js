
// The page while a server stands behind it: `page.js` shows a reading, this gets it, follows it and steers it.
const given = new URLSearchParams(location.hash.slice(1)).get("token");
if (given) {
  sessionStorage.setItem("token", given);
  history.replaceState(null, "", location.pathname + location.search);
}
let runs = [];
let listed; // the runs as the picker shows them
let run = null;
let editing = false;
let drafts = {}; // of memories, by their place: looking at another step loses none
let asked = 0; // counts the runs that were chosen: an answer about another one comes too late

const bar = element("div");
bar.id = "live";
const picker = element("select");
picker.id = "runs";
picker.setAttribute("aria-label", "Run");
const state = element("span");
state.id = "state";
state.setAttribute("role", "status");
const act = (text, kind, action) => {
  const button = element("button", text, `act ${kind}`);
  button.type = "button";
  button.addEventListener("click", action);
  return button;
};
const pausing = act("Pause", "", () => change("pause", { name: run.name }));
const resuming = act("Resume", "first", () => change("resume", { name: run.name }));
bar.append(picker, state, pausing, resuming);
const note = element("p");
note.id = "note";
note.setAttribute("role", "alert");
document.querySelector("header").prepend(bar);
document.querySelector("header").append(note);
picker.addEventListener("change", () => choose(picker.value));

async function ask(path, body) {
  const headers = { Authorization: `Bearer ${sessionStorage.getItem("token") || ""}` };
  const options = body ? { method: "POST", body: JSON.stringify(body), headers } : { headers };
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new Error("the server does not answer; is memagent serve still running?");
  }
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

async function change(what, body) {
  note.textContent = "";
  try {
    const answer = await ask(`/api/${what}`, body);
    await follow(asked);
    return answer;
  } catch (error) {
    note.textContent = error.message;
    return null;
  }
}

async function choose(name) {
  asked += 1;
  [run, editing, drafts, note.textContent] = [null, false, {}, ""];
  const url = new URL(location.href);
  url.searchParams.set("run", name);
  url.hash = "";
  history.replaceState(null, "", url);
  scrollTo(0, 0);
  await follow(asked);
}

async function follow(turn) {
  const name = run ? run.name : new URLSearchParams(location.search).get("run");
  const have = run ? run.steps : 0;
  const answer = await ask(`/api/run?${new URLSearchParams({ name, have })}`);
  if (turn !== asked) return;
  if (answer.run.steps < have || (run && run.created !== answer.run.created)) { // another run has got the name
    run = null;
    return follow(turn);
  }
  take(answer, have);
}

function take({ run: found, reading: news }, have) {
  if (run && (run.steps !== have)) return; // two answers to the same question
  const last = !reading || !run || current === reading.steps.length - 1;
  run = found;
  if (news && have === 0) load(news);
  else if (news) {
    append(news.steps);
    const sum = (a, b) => (a === null || b === null ? null : a + b);
    const [tokens, seconds] = [reading.tokens.map((count, kind) => sum(count, news.tokens[kind])), reading.seconds + news.seconds];
    reading = { ...news, ...(run.finished ? {} : { tokens, seconds }), steps: reading.steps };
    head();
  }
  const unfinished = !run.finished;
  byId("answer").classList.toggle("error", false);
  if (unfinished) byId("answer").textContent = "";
  state.textContent = run.steps && unfinished ? `${run.state} · ${number(reading.steps.length)} chunks` : run.state;
  state.className = run.state;
  const busy = run.active || run.state === "starting";
  pausing.hidden = !unfinished || !busy;
  resuming.hidden = !unfinished || busy;
  pausing.disabled = run.state !== "reading";
  if (run.failure && run.state !== "paused") note.textContent = run.failure;
  if (news && reading.steps.length && last && !editing) {
    const place = have === 0 ? Number(location.hash.slice(1)) - 1 : -1;
    show(place >= 0 && place < reading.steps.length ? place : reading.steps.length - 1);
  }
}

whenShown = (place, focus) => {
  if (focus) history.replaceState(null, "", `#${place + 1}`);
  editing = false;
  const step = reading.steps[place];
  const acts = element("div");
  acts.id = "acts";
  acts.append(
    act("Edit the memory", "", () => edit(place)), // with what was written before, if it was left
    act("Branch from here", "", () => branch(step, null)),
  );
  document.querySelector("#step .memory").after(acts);
};

function edit(place) {
  editing = true;
  const step = reading.steps[place];
  const text = element("textarea");
  text.id = "memory";
  text.value = drafts[place] ?? memory(step);
  text.addEventListener("input", () => { drafts[place] = text.value; });
  text.setAttribute("aria-label", `Memory after chunk ${place + 1}`);
  const acts = element("div");
  acts.id = "acts";
  acts.append(
    act("Continue with this memory", "first", () => branch(step, text.value)),
    act("Cancel", "", () => { delete drafts[place]; show(place); }),
  );
  byId("acts").remove();
  document.querySelector("#step .memory").replaceWith(text, acts);
  text.focus();
}

async function branch(step, changed) {
  const made = await change("branch", { name: run.name, step: step.index, memory: changed });
  if (!made) return;
  await choose(made.name);
  await list();
  await change("resume", { name: made.name });
}

async function list() {
  runs = await ask("/api/runs");
  const options = runs.toReversed().map((each) => {
    const option = element("option", `${each.name} · ${each.state} · ${each.question.slice(0, 60)}`);
    option.value = each.name;
    return option;
  });
  const told = options.map((option) => option.textContent).join("\n");
  if (told !== listed && document.activeElement !== picker) {
    picker.replaceChildren(...options); // not while somebody chooses, and not for nothing
    listed = told;
  }
  if (run) picker.value = run.name;
}

async function tick() {
  try {
    await list();
    if (!run && runs.length) {
      const wished = new URLSearchParams(location.search).get("run");
      const name = runs.some((each) => each.name === wished) ? wished : runs[runs.length - 1].name;
      if (name !== wished) await choose(name);
      else await follow(asked);
      picker.value = name;
    } else if (run) await follow(asked);
    if (note.dataset.lost) [note.textContent, note.dataset.lost] = ["", ""];
    if (!runs.length) byId("question").textContent = "There are no runs in this journal yet.";
  } catch (error) {
    note.textContent = error.message;
    note.dataset.lost = "yes";
  }
  bar.hidden = !runs.length;
  setTimeout(tick, document.hidden ? 5000 : 1000);
}
tick();
