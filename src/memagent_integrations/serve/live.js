
// The page as a server sends it: `page.js` shows a reading; this script fetches it, follows it and changes its run.
const token = new URLSearchParams(location.hash.slice(1)).get("token");
if (token) {
  sessionStorage.setItem("token", token);
  history.replaceState(null, "", location.pathname + location.search);
}
let runs = [];
let listed; // the labels that the picker shows
let run = null;
let editing = false;
let drafts = {}; // edited memories by their position: looking at another step loses none
let choice = 0; // counts the runs that were chosen: an answer about an earlier one comes too late

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
    await follow(choice);
    return answer;
  } catch (error) {
    note.textContent = error.message;
    return null;
  }
}

async function choose(name) {
  choice += 1;
  [run, editing, drafts, note.textContent] = [null, false, {}, ""];
  const url = new URL(location.href);
  url.searchParams.set("run", name);
  url.hash = "";
  history.replaceState(null, "", url);
  scrollTo(0, 0);
  await follow(choice);
}

async function follow(expected) {
  const name = run ? run.name : new URLSearchParams(location.search).get("run");
  const have = run ? run.steps : 0;
  const answer = await ask(`/api/run?${new URLSearchParams({ name, have })}`);
  if (expected !== choice) return;
  if (answer.run.steps < have || (run && run.created !== answer.run.created)) { // the name belongs to another run now
    run = null;
    return follow(expected);
  }
  take(answer, have);
}

function take({ run: latest, reading: news }, have) {
  if (run && (run.steps !== have)) return; // the second answer to the same request
  const last = !reading || !run || current === reading.steps.length - 1;
  run = latest;
  if (news && have === 0) load(news);
  else if (news) {
    append(news.steps);
    const sum = (a, b) => (a === null || b === null ? null : a + b);
    const tokens = reading.tokens.map((count, kind) => sum(count, news.tokens[kind]));
    const seconds = reading.seconds + news.seconds;
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
    const linked = have === 0 ? Number(location.hash.slice(1)) - 1 : -1;
    show(linked >= 0 && linked < reading.steps.length ? linked : reading.steps.length - 1);
  }
}

whenShown = (position, focus) => {
  if (focus) history.replaceState(null, "", `#${position + 1}`);
  editing = false;
  const step = reading.steps[position];
  const acts = element("div");
  acts.id = "acts";
  acts.append(
    act("Edit the memory", "", () => edit(position)), // with the draft, if there is one
    act("Branch from here", "", () => branch(step, null)),
  );
  document.querySelector("#step .memory").after(acts);
};

function edit(position) {
  editing = true;
  const step = reading.steps[position];
  const text = element("textarea");
  text.id = "memory";
  text.value = drafts[position] ?? memory(step);
  text.addEventListener("input", () => { drafts[position] = text.value; });
  text.setAttribute("aria-label", `Memory after chunk ${position + 1}`);
  const acts = element("div");
  acts.id = "acts";
  acts.append(
    act("Continue with this memory", "first", () => branch(step, text.value)),
    act("Cancel", "", () => { delete drafts[position]; show(position); }),
  );
  byId("acts").remove();
  document.querySelector("#step .memory").replaceWith(text, acts);
  text.focus();
}

async function branch(step, changed) {
  const answer = await change("branch", { name: run.name, step: step.index, memory: changed });
  if (!answer) return;
  await choose(answer.name);
  await list();
  await change("resume", { name: answer.name });
}

async function list() {
  runs = await ask("/api/runs");
  const options = runs.toReversed().map((each) => {
    const option = element("option", `${each.name} · ${each.state} · ${each.question.slice(0, 60)}`);
    option.value = each.name;
    return option;
  });
  const labels = options.map((option) => option.textContent).join("\n");
  if (labels !== listed && document.activeElement !== picker) {
    picker.replaceChildren(...options); // only when they changed, and never while somebody chooses
    listed = labels;
  }
  if (run) picker.value = run.name;
}

async function tick() {
  try {
    await list();
    if (!run && runs.length) {
      const linked = new URLSearchParams(location.search).get("run");
      const name = runs.some((each) => each.name === linked) ? linked : runs[runs.length - 1].name;
      if (name !== linked) await choose(name);
      else await follow(choice);
      picker.value = name;
    } else if (run) await follow(choice);
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
