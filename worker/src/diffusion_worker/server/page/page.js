// SPDX-License-Identifier: Apache-2.0
// The page of a worker. It calls only the API beside it, by relative addresses, so that it works under a prefix too.

const KEY = "diffusion-worker-key";
const PREVIEWS = 3;
const CALM_MS = 2000;
const LOADING_MS = 1000;
const AWAY_MS = 6000;
// Smaller images are shown enlarged, pixel by pixel.
const SMALL_PX = 256;

const byId = (id) => document.getElementById(id);
const NUMBERS = ["num_inference_steps", "guidance_scale"];
const FIELDS = ["prompt", "negative_prompt", "size", "seed", "quality", "output_format", ...NUMBERS];

const STATES = {
  starting: ["wait", "the model is loading"],
  ready: ["good", "ready"],
  draining: ["wait", "going to sleep when running requests are finished"],
  sleeping: ["wait", "going to sleep"],
  asleep: ["rest", "asleep: no images until somebody wakes it (sleep policy AlwaysAwake or OnIdle, or POST /v1/wake on the control port)"],
  waking: ["wait", "waking up"],
  restarting: ["wait", "a rank was lost; the ranks are being started again, requests are kept"],
  failed: ["bad", "failed: the worker ends, and a cluster starts it again"],
  terminating: ["bad", "shutting down"],
};
// State texts under the sleep policy OnIdle.
const WAKEABLE = {
  draining: "going to sleep, unless somebody asks for an image",
  sleeping: "going to sleep",
  asleep: "asleep: the next request wakes the model (sleep policy OnIdle)",
};
// The reason why a request waits, by the worker's state.
const WAITS = {
  starting: "the model is loading",
  draining: "the model was about to sleep and stays awake",
  sleeping: "the model is falling asleep and will be woken",
  asleep: "the model is asleep and is being woken",
  waking: "the model is waking up",
  restarting: "the ranks are being started again",
};

const AGAIN = "Try again in a moment.";
const ADVICE = {
  InvalidRequest: "Change the field named above and try again.",
  Unauthorized: "Enter the worker's API key at the top of the page.",
  Forbidden: "Open the page at the worker's own address, or start the worker with a --cors-origin that allows this one.",
  model_not_found: "The list of adapters was read again; choose an adapter from it.",
  AdapterNotLoaded: "The adapter is known, but not loaded yet. " + AGAIN,
  AdapterRemoved: "The adapter was removed meanwhile. Choose another one.",
  Starting: "The model is still loading. The top of the page shows the progress.",
  Asleep: "The model sleeps and has freed its memory. Wake it (sleep policy AlwaysAwake or OnIdle, or POST /v1/wake on the control port), then try again.",
  Busy: "The model did not serve in time. " + AGAIN,
  Overloaded: "The queue is full. " + AGAIN,
  Terminating: "This worker is being replaced. " + AGAIN,
  InsufficientMemory: "Choose a smaller size, or try again when the worker is less busy.",
  RankFailed: "The worker lost its ranks too often while this image was made. Try again; if it happens again, the worker's log says why.",
  EngineFailed: "The worker failed and ends; a cluster starts it again. " + AGAIN,
  RequestFailed: "The model failed on this request. Try another size or other options; the worker's log has the error.",
  Timeout: "The image took too long. Try again with fewer steps or a smaller size.",
  Cancelled: "Somebody cancelled this request.",
  Unreachable: "Check that the worker runs and that you are connected to it. " + AGAIN,
};
const TITLES = { InvalidRequest: "This image cannot be made", Unauthorized: "A key is needed", Unreachable: "The worker does not answer" };

/** An error of the API. */
class Problem extends Error {
  constructor({ code, message, param }) {
    super(message);
    this.code = code;
    this.field = param;
  }
}

let running = null;
let imageUrl = null;
let lastState = null;

// --- calls ---

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** Call the API and return its answer; throw a Problem unless its status is a 2xx. */
async function call(path, options = {}) {
  const answer = await fetch(path, { ...options, headers: { ...headers(), ...options.headers } });
  if (answer.ok) return answer;
  if (answer.status === 401) byId("key-section").hidden = false;
  const told = await answer.json().catch(() => null);
  throw new Problem(told?.error ?? { code: `HTTP ${answer.status}`, message: answer.statusText });
}

/** Yield the events of a server-sent stream, as [type, data]. */
async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let parts = [];
  for (let { value, done } = await reader.read(); !done; { value, done } = await reader.read()) {
    // Only the new piece and the end of the piece before are searched, as an image comes in many pieces.
    const seam = (parts.at(-1) ?? "").slice(-1);
    parts.push(value);
    if (!(seam + value).includes("\n\n")) continue;
    const blocks = parts.join("").split("\n\n");
    parts = [blocks.pop()];
    for (const block of blocks) {
      const event = parsed(block);
      if (event) yield event;
    }
  }
}

function parsed(block) {
  let type = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event:")) type = line.slice(6).trim();
    if (line.startsWith("data:")) data.push(line.slice(5));
  }
  return data.length ? [type, JSON.parse(data.join("\n"), withWholeSeeds)] : null;
}

/** Keep a seed as it was written, if the browser knows its text: it may have more digits than a number of JavaScript. */
function withWholeSeeds(name, value, context) {
  return name === "seed" && context?.source ? context.source : value;
}

// --- an image ---

/** Return the request of the form; the worker has defaults for empty fields. */
function wanted() {
  const body = { prompt: byId("prompt").value, stream: true, stream_options: { include_progress: true }, partial_images: PREVIEWS, n: 1, timings: true };
  for (const name of ["negative_prompt", "quality", "output_format"]) {
    if (byId(name).value) body[name] = byId(name).value;
  }
  for (const name of NUMBERS) {
    const field = byId(name);
    if (field.validity.badInput) throw refused(name, `${name}: expected a number`);
    if (field.value) body[name] = Number(field.value);
  }
  if (adapterRows().length) body.lora = adapterRows().map(wantedAdapter);
  const seed = byId("seed").value.trim();
  if (seed && !/^\d{1,19}$/.test(seed)) throw refused("seed", "seed: expected a whole number of 0 or more, with at most 19 digits");
  const [width, height] = [byId("width"), byId("height")];
  // An empty side stands for its placeholder.
  if (width.value || height.value) body.size = [width, height].map((side) => side.value || side.placeholder || "auto").join("x");
  const text = JSON.stringify(body);
  return seed ? `${text.slice(0, -1)},"seed":${BigInt(seed)}}` : text;
}

function wantedAdapter(row, index) {
  const strength = row.querySelector("input");
  if (strength.validity.badInput) throw refused(`lora[${index}].scale`, `strength of ${row.dataset.name}: expected a number`);
  return strength.value ? { name: row.dataset.name, scale: Number(strength.value) } : { name: row.dataset.name };
}

function refused(field, message) {
  return new Problem({ code: "InvalidRequest", message, param: field });
}

async function make() {
  running = new AbortController();
  begin();
  try {
    const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: wanted(), signal: running.signal };
    let finished = false;
    for await (const [type, data] of eventsOf(await call("v1/images/generations", options))) {
      if (type === "error") throw new Problem(data.error);
      if (type.endsWith(".held")) showWait(data);
      if (type.endsWith(".progress")) showStep(data);
      if (type.endsWith(".partial_image")) showImage(data, true);
      if (type.endsWith(".completed")) {
        showImage(data, false);
        showProvenance(data);
        finished = true;
      }
    }
    if (!finished) throw new Problem({ code: "Unreachable", message: "The connection ended before the image was finished." });
    announce("Finished.", 1, 1);
    setText("news", "The image is finished.");
  } catch (error) {
    if (error.name === "AbortError") cancelled();
    else fail(error);
  } finally {
    running = null;
    byId("make").disabled = false;
    if (document.activeElement === byId("cancel")) byId("make").focus();
    byId("cancel").disabled = true;
    refresh();
  }
}

function begin() {
  for (const field of document.querySelectorAll("[aria-invalid]")) field.removeAttribute("aria-invalid");
  byId("error").hidden = true;
  byId("empty").hidden = true;
  byId("figure").hidden = true;
  byId("caption").hidden = true;
  byId("cancel").disabled = false;
  // The focus of the keyboard stays at the buttons.
  if (document.activeElement === byId("make")) byId("cancel").focus();
  byId("make").disabled = true;
  announce("Sent. Waiting for the first step …");
  setText("news", "The image is being made.");
  // On a phone the result is below the form.
  if (matchMedia("(max-width: 44rem)").matches) byId("result").scrollIntoView();
}

function announce(text, done, all) {
  byId("progress").hidden = false;
  byId("progress-text").textContent = text;
  const bar = byId("bar");
  if (all) [bar.max, bar.value] = [all, done];
  else bar.removeAttribute("value");
}

function showWait({ state, ahead }) {
  const before = ahead ? `, ${ahead} ${ahead === 1 ? "request" : "requests"} before this one` : "";
  announce(`Waiting: ${WAITS[state] ?? state}${before} …`);
  refresh();
}

function showStep({ step, steps }) {
  const text = steps ? `Step ${step} of ${steps}` : `Step ${step}`;
  announce(step ? text : "Starting the image again …", step, steps);
}

function showImage({ b64_json, output_format, size }, isPreview) {
  const bytes = Uint8Array.from(atob(b64_json), (letter) => letter.charCodeAt(0));
  if (imageUrl) URL.revokeObjectURL(imageUrl);
  imageUrl = URL.createObjectURL(new Blob([bytes], { type: `image/${output_format}` }));
  const image = byId("image");
  image.src = imageUrl;
  image.alt = isPreview ? "A preview of the image" : `Image of: ${byId("prompt").value}`;
  image.classList.toggle("preview", isPreview);
  image.classList.toggle("small", Number(size.split("x")[0]) < SMALL_PX);
  byId("figure").hidden = false;
}

function showProvenance({ seed, provenance, timings, output_format, b64_json }) {
  const adapters = provenance.adapters.map(adapterText).join(", ") || "none";
  const rows = Object.entries({ ...provenance, adapters, seconds: timings.total.toFixed(2) })
    .filter(([, value]) => value !== null)
    .flatMap(([name, value]) => [element("dt", name.replaceAll("_", " ")), element("dd", String(value))]);
  byId("provenance").replaceChildren(...rows);
  const link = byId("download");
  link.href = imageUrl;
  link.download = `${provenance.model}-${seed}.${output_format}`;
  link.textContent = `Download (${Math.ceil((b64_json.length * 3) / 4 / 1024)} KiB)`;
  byId("again").dataset.seed = seed;
  byId("caption").hidden = false;
}

function adapterText({ name, scale, digest }) {
  return `${name} × ${scale} (${digest.slice(0, 19)}…)`;
}

function element(tag, text) {
  const made = document.createElement(tag);
  made.textContent = text;
  return made;
}

function cancelled() {
  announce("Cancelled.", 0, 1);
  setText("news", "Cancelled.");
  byId("figure").hidden = true;
  byId("empty").hidden = false;
}

function fail(error) {
  const problem = error instanceof Problem ? error : new Problem({ code: "Unreachable", message: "No answer came from the worker." });
  byId("progress").hidden = true;
  byId("figure").hidden = true;
  byId("error-title").textContent = TITLES[problem.code] ?? "No image was made";
  byId("error-message").textContent = problem.message;
  byId("error-advice").textContent = ADVICE[problem.code] ?? AGAIN;
  byId("error-code").textContent = problem.code;
  byId("error").hidden = false;
  if (problem.code === "model_not_found") loadModels();
  const field = fieldOf(problem.field ?? "");
  field?.setAttribute("aria-invalid", "true");
  (problem.field === "size" ? byId("width") : field)?.focus();
}

/** Return the page's field for the API's name of it; null if there is none. */
function fieldOf(name) {
  const adapter = /^lora\[(\d+)\]/.exec(name);
  if (adapter) return adapterRows()[adapter[1]]?.querySelector("input") ?? null;
  if (name.startsWith("lora")) return byId("add_adapter");
  return FIELDS.includes(name) ? byId(name) : null;
}

// --- adapters ---

let adapters = [];
let mostAdapters = 0;

function adapterRows() {
  return [...byId("adapters").children];
}

/** Add an adapter. It has its own strength while the field is empty. */
function addAdapter({ id, scale }) {
  const row = element("li", "");
  row.dataset.name = id;
  const label = element("label", id);
  label.htmlFor = `strength-${id}`;
  const strength = element("input", "");
  Object.assign(strength, { id: label.htmlFor, type: "number", inputMode: "decimal", step: "any", min: -4, max: 4, placeholder: scale ?? 1, title: "Strength" });
  const remove = element("button", "Remove");
  remove.type = "button";
  remove.setAttribute("aria-label", `Remove ${id}`);
  remove.addEventListener("click", () => {
    row.remove();
    offerAdapters();
    byId("add_adapter").focus();
  });
  row.append(label, strength, remove);
  byId("adapters").append(row);
  offerAdapters();
}

/** Offer the adapters that can still be added, and remove chosen ones that are no longer served. */
function offerAdapters() {
  for (const row of adapterRows()) if (!adapters.some(({ id }) => id === row.dataset.name)) row.remove();
  const chosen = adapterRows().map((row) => row.dataset.name);
  const free = adapters.filter(({ id }) => !chosen.includes(id));
  const options = free.map(({ id, state }) => new Option(state === "Cached" ? `${id} (is loaded first)` : id, id));
  const list = byId("add_adapter");
  list.replaceChildren(new Option(chosen.length ? "add another one …" : "none (base model)", ""), ...options);
  list.disabled = !free.length || chosen.length >= mostAdapters;
}

// --- the worker ---

async function loadModels() {
  const { data } = await (await call("v1/models")).json();
  const base = data[0];
  document.title = byId("title").textContent = base.id;
  const { defaults, limits } = base;
  adapters = data.slice(1);
  mostAdapters = limits.max_adapters;
  offerAdapters();
  const [width, height] = (defaults.size ?? "x").split("x");
  byId("width").placeholder = width;
  byId("height").placeholder = height;
  byId("width").step = byId("height").step = limits.size_multiple ?? 1;
  byId("num_inference_steps").placeholder = defaults.num_inference_steps ?? "";
  byId("num_inference_steps").max = limits.max_steps;
  byId("guidance_scale").placeholder = defaults.guidance_scale ?? "";
}

function showStatus({ state, percent, in_flight, queued, held, paused, policy, ranks }) {
  const [lamp, words] = STATES[state] ?? ["wait", state];
  const text = (policy === "OnIdle" && WAKEABLE[state]) || words;
  const load = percent !== null ? `, ${percent} %` : "";
  const pause = paused ? ", paused: no step runs until somebody resumes the worker" : "";
  const work = state === "ready" && in_flight + queued ? `, ${in_flight} in progress, ${queued} waiting` : "";
  const kept = held ? `, ${held} held until the model serves` : "";
  byId("lamp").className = paused && lamp === "good" ? "wait" : lamp;
  setText("state-text", text + load + pause + work + kept);
  byId("ranks").replaceChildren(...ranks.map(({ rank, state }) => element("li", `rank ${rank}: ${state}`)));
}

/** Set an element's text only if it changes, as a screen reader reads every new text. */
function setText(id, text) {
  if (byId(id).textContent !== text) byId(id).textContent = text;
}

let timer = null;

/** Show the state, and refresh it after a while, unless the page is hidden. */
async function refresh() {
  clearTimeout(timer);
  if (document.hidden) return;
  let pause = AWAY_MS;
  try {
    const status = await (await call("v1/status")).json();
    showStatus(status);
    if (status.state !== lastState) await loadModels();
    lastState = status.state;
    pause = status.percent !== null ? LOADING_MS : CALM_MS;
  } catch (error) {
    lastState = null;
    byId("lamp").className = "bad";
    setText("state-text", error instanceof Problem ? error.message : "the worker does not answer");
    byId("ranks").replaceChildren();
    // Without a key there is nothing to ask for.
    if (error instanceof Problem && error.code === "Unauthorized") return;
  }
  clearTimeout(timer);
  timer = setTimeout(refresh, pause);
}

byId("request").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!running) make();
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("request").requestSubmit();
});
byId("add_adapter").addEventListener("change", ({ target }) => {
  const adapter = adapters.find(({ id }) => id === target.value);
  if (adapter) addAdapter(adapter);
});
byId("cancel").addEventListener("click", () => running?.abort());
byId("again").addEventListener("click", ({ target }) => {
  byId("seed").value = target.dataset.seed;
  byId("seed").focus();
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value);
  byId("key").value = "";
  byId("key-section").hidden = true;
  refresh();
});
document.addEventListener("visibilitychange", refresh);
refresh();
