// Shows what /api/v1/node and /api/v1/history answer, again and again. Whatever stands in a name becomes text, never markup.
// Unknown is null there and "unknown" here; 0 was measured.

const VERSION = document.body.dataset.version;
const API_VERSION = "v1";
const MAX_BREACHES = 8;
const SVG = "http://www.w3.org/2000/svg";

const at = (id) => document.getElementById(id);

// --- quantities and names as text ---

// A number and its unit stay on one line.
const quantity = (number, unit) => `${number}\u00a0${unit}`;

function bytes(amount) {
  if (amount < 1024) return quantity(amount, "B");
  const units = ["KiB", "MiB", "GiB", "TiB"];
  let value = amount / 1024;
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return quantity(value.toFixed(value >= 100 ? 0 : 1), units[unit]);
}

const percent = (ratio) => quantity((ratio * 100).toFixed(ratio > 0 && ratio < 0.0995 ? 1 : 0), "%");

function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return quantity(whole, "s");
  const [larger, size, smaller, part] = whole < 3600 ? ["min", 60, "s", 1] : ["h", 3600, "min", 60];
  const rest = Math.floor((whole % size) / part);
  return quantity(Math.floor(whole / size), larger) + (rest ? `\u00a0${quantity(rest, smaller)}` : "");
}

// "47.4 to 48.4 GiB": a unit that both share is said once.
function join(one, between, other, format) {
  const [from, to] = [format(one), format(other)];
  const [number, unit] = from.split("\u00a0");
  return `${to.endsWith(`\u00a0${unit}`) ? number : from} ${between} ${to}`;
}

const range = (least, most, format) => (format(least) === format(most) ? format(most) : join(least, "to", most, format));

// A share of a share would be misread.
function useOfLimit(used, limit, format) {
  if (used === null) return limit === null ? "unknown" : `unknown, limit ${format(limit)}`;
  if (limit === null) return `${format(used)}, no limit`;
  return format === percent ? `${percent(used)}, limit ${percent(limit)}` : join(used, "of", limit, format);
}

const clockTime = (milliseconds) => new Date(milliseconds).toLocaleTimeString();
const plural = (count, one, many = `${one}s`) => `${count} ${count === 1 ? one : many}`;

// Marks that turn the direction of writing or cannot be seen could make one name look like another.
const INVISIBLE = /[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu;
const visible = (name) => name.replace(INVISIBLE, (mark) => `⟨U+${mark.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);

// --- elements ---

function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") element.className = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function describe(element, name, text) {
  if (element.getAttribute(name) !== text) element.setAttribute(name, text);
}

function show(element, isShown) {
  // Not the property: elements of SVG have none.
  if (element.hasAttribute("hidden") === isShown) element.toggleAttribute("hidden", !isShown);
}

// Keeps an element for each key, so that focus, selection and scrolling outlive a refresh.
class Children {
  constructor(parent, create) {
    this.parent = parent;
    this.create = create;
    this.views = new Map();
  }

  update(entries) {
    const keys = new Set(entries.map(([key]) => key));
    for (const [key, view] of this.views) {
      if (!keys.has(key)) {
        view.element.remove();
        this.views.delete(key);
      }
    }
    let next = this.parent.firstElementChild;
    for (const [key, ...facts] of entries) {
      let view = this.views.get(key);
      if (!view) {
        view = this.create();
        this.views.set(key, view);
      }
      if (view.element === next) next = next.nextElementSibling;
      else this.parent.insertBefore(view.element, next);
      view.update(...facts);
    }
  }
}

// --- why something is unknown ---

function whyNoUse(node, gpu) {
  const isDown = (name) => node.sources.some((source) => source.source === name && !source.up);
  if (isDown("nvml")) return "the driver is not read";
  if (gpu && gpu.up === false) return "the GPU does not answer";
  if (isDown("procfs")) return "processes are not read";
  if (gpu && gpu.processes_memory_hidden > 0) return "the driver hides it";
  return "";
}

function whyNoTime(node, gpu) {
  if (gpu && gpu.parent_gpu_uuid) return "not told on MIG devices";
  return whyNoUse(node, gpu) || `no full ${duration(node.compute_window_seconds)} yet`;
}

const unknown = (why) => (why ? `unknown: ${why}` : "unknown");

// Without any pod it is open whether there are none: who is on the GPUs follows from all of these together.
function whyNoPods(node) {
  if (node.pods?.length) return "";
  const down = node.sources.filter((source) => !source.up && source.source !== "hostfiles").map((source) => source.source);
  return down.length ? `not read: ${down.join(", ")}` : "";
}

// --- parts ---

// Use beside a limit: what is used, what is over, what is left.
function weigh(used, limit) {
  if (used === null) return { use: 0, over: 0, rest: limit ?? 0 };
  if (limit === null) return { use: used, over: 0, rest: 0 };
  return { use: Math.min(used, limit), over: Math.max(0, used - limit), rest: Math.max(0, limit - used) };
}

// The parts of a flex container fill it only when their sum is 1 or more.
const WHOLE = 1000;

function grow(element, share) {
  const text = (share * WHOLE).toFixed(2);
  if (element.style.flexGrow !== text) element.style.flexGrow = text;
}

class Meter {
  constructor(className) {
    this.use = make("div", { class: "use" });
    this.over = make("div", { class: "over" });
    this.rest = make("div");
    this.element = make("div", { class: className, "aria-hidden": "true" }, this.use, this.over, this.rest);
  }

  update(used, limit) {
    const { use, over, rest } = weigh(used, limit);
    const sum = use + over + rest || 1;
    grow(this.use, use / sum);
    grow(this.over, over / sum);
    show(this.over, over > 0);
    grow(this.rest, rest / sum);
  }
}

class Plot {
  constructor(title) {
    this.title = title;
    this.paths = ["gap", "area", "line", "limit"].map((name) => {
      const path = document.createElementNS(SVG, "path");
      path.setAttribute("class", name);
      return path;
    });
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.setAttribute("role", "img");
    this.svg.setAttribute("preserveAspectRatio", "none");
    this.svg.append(...this.paths);
    this.caption = make("span", { "aria-hidden": "true" });
    this.element = make("div", { class: "plot" }, this.svg, this.caption);
  }

  // `why` is said where nothing at all is known.
  update(points, top, limit, format, minutes, why) {
    if (points === this.points && limit === this.limit && top === this.top && why === this.why) return;
    Object.assign(this, { points, limit, top, why });
    const known = points ? points.filter((value) => value !== null) : [];
    show(this.svg, known.length > 0);
    if (known.length === 0) {
      this.caption.removeAttribute("aria-hidden");
      say(this.caption, `${this.title} ${unknown(why)}`);
      return;
    }
    const least = Math.min(...known);
    const most = Math.max(...known);
    const missing = points.length - known.length;
    const extent = range(least, most, format);
    this.caption.setAttribute("aria-hidden", "true");
    say(this.caption, `${this.title} ${extent}`);
    const end = points.at(-1);
    const gaps = missing ? `; unknown for ${duration((missing / points.length) * minutes * 60)}` : "";
    const label = `${this.title} in the last ${quantity(minutes, "min")}: ${extent}; now ${end === null ? "unknown" : format(end)}${gaps}`;
    describe(this.svg, "aria-label", label);
    describe(this.svg, "viewBox", `0 0 ${points.length} 100`);
    draw(this.paths, points, Math.max(top ?? 0, limit ?? 0, most) * 1.06 || 1, limit);
  }
}

// Unknown points break the line and shade the ground. A limit is drawn at the right end only: no one knows what it was before.
function draw([gap, area, line, limitMark], points, top, limit) {
  const height = (value) => (100 - (value / top) * 98).toFixed(1);
  let lines = "";
  let areas = "";
  let gaps = "";
  let start = 0;
  while (start < points.length) {
    let stop = start + 1;
    while (stop < points.length && (points[stop] === null) === (points[start] === null)) stop += 1;
    if (points[start] === null) {
      gaps += `M${start} 0H${stop}V100H${start}Z`;
    } else {
      const run = points.slice(start, stop).map((value, index) => `${start + index + 0.5} ${height(value)}`);
      lines += `M${run.join("L")}${run.length === 1 ? "h.01" : ""}`;
      areas += `M${start + 0.5} 100L${run.join("L")}L${stop - 0.5} 100Z`;
    }
    start = stop;
  }
  gap.setAttribute("d", gaps);
  area.setAttribute("d", areas);
  line.setAttribute("d", lines);
  limitMark.setAttribute("d", limit === null ? "" : `M${points.length * 0.9} ${height(limit)}H${points.length}`);
}

// --- GPUs ---

class Slot {
  constructor() {
    this.name = make("span");
    this.meter = new Meter("track");
    this.element = make("div", { class: "slot" }, this.name, this.meter.element);
  }

  update({ kind, name, used, limit, title }, sum) {
    grow(this.element, width({ used, limit }) / sum);
    const className = `slot ${kind}`;
    if (this.element.className !== className) this.element.className = className;
    say(this.name, name);
    describe(this.element, "title", title);
    this.meter.update(used, limit);
  }
}

function ownedSlots(rows, parts) {
  const slots = rows
    .filter(({ on }) => on.memory_used_bytes || on.memory_limit_bytes)
    .map(({ pod, on }) => {
      const used = on.memory_used_bytes;
      const limit = on.memory_limit_bytes;
      return {
        key: pod.pod_uid,
        kind: used === null ? "unknown" : limit === null ? "bare" : "given",
        name: visible(pod.pod),
        used,
        limit,
        title: `${visible(pod.namespace)}/${visible(pod.pod)}: ${useOfLimit(used, limit, bytes)}`,
      };
    });
  for (const part of parts) {
    const used = part.memory_used_bytes;
    const name = gpuName(part);
    const title = `${name}: ${useOfLimit(used, part.memory_total_bytes, bytes)}`;
    slots.push({ key: part.gpu_uuid, kind: used === null ? "unknown" : "given", name, used, limit: part.memory_total_bytes, title });
  }
  return slots;
}

const REASONS = {
  host_process: "processes of the host",
  process_gone: "processes that ended meanwhile",
  unknown_container: "containers not known (yet)",
  mps_server: "the MPS server",
  exporter: "the exporter",
  partly_hidden: "containers whose memory the driver hides in part",
};

function gpuSlots(gpu, rows, parts) {
  const slots = ownedSlots(rows, parts);
  const others = Object.entries(gpu.unattributed_memory_bytes ?? {}).filter(([, amount]) => amount > 0);
  for (const [reason, amount] of others) {
    const title = `of no pod, ${REASONS[reason] ?? visible(reason)}: ${bytes(amount)}`;
    slots.push({ key: `other ${reason}`, kind: "other", name: REASONS[reason] ?? visible(reason), used: amount, limit: null, title });
  }
  return slots;
}

const width = ({ used, limit }) => Math.max(used ?? 0, limit ?? 0);

function gpuName(gpu) {
  const number = gpu.gpu === null ? "" : ` ${gpu.gpu}`;
  return gpu.parent_gpu_uuid ? `MIG${number} ${visible(gpu.mig_profile ?? "")}`.trim() : `GPU${number}`;
}

class GpuView {
  constructor() {
    this.name = make("span");
    this.facts = make("span", { class: "quiet" });
    this.figures = make("p", { class: "figures" });
    this.bar = make("div", { class: "bar", role: "img" });
    this.slots = new Children(this.bar, () => new Slot());
    this.memory = new Plot("memory");
    this.busy = new Plot("busy");
    this.end = make("div", { class: "end", title: "where this GPU's memory ends" });
    const said = make("div", { class: "said" }, make("h3", {}, this.name, " ", this.facts), this.figures);
    const frame = make("div", { class: "frame" }, this.bar, this.end);
    this.element = make("li", { class: "gpu" }, said, frame, this.memory.element, this.busy.element);
  }

  update(node, gpu, rows, parts, past) {
    this.element.classList.toggle("part", gpu.parent_gpu_uuid !== null);
    say(this.name, gpuName(gpu));
    say(this.facts, [gpu.parent_gpu_uuid ? null : gpu.model, gpu.gpu_uuid].filter(Boolean).map(visible).join(" · "));
    say(this.figures, gpuFigures(node, gpu, parts));
    const total = gpu.memory_total_bytes;
    const slots = gpuSlots(gpu, rows, parts);
    const taken = slots.reduce((sum, slot) => sum + width(slot), 0);
    const left = (total ?? 0) - taken;
    if (left > 0) slots.push({ key: "free", kind: "free", name: "", used: null, limit: left, title: `${bytes(left)} ${notGiven(node, "not given to any pod")}` });
    const sum = Math.max(taken, total ?? 0) || 1;
    this.slots.update(slots.map((slot) => [slot.key, slot, sum]));
    describe(this.bar, "aria-label", barText(node, gpu, rows, taken));
    show(this.bar, slots.length > 0);
    show(this.end, total !== null && gpu.memory_allocated_bytes > total);
    this.end.style.left = `${((total ?? 0) / sum) * 100}%`;
    const why = whyNoUse(node, gpu);
    const minutes = past.minutes;
    const series = past.gpus.get(gpu.gpu_uuid);
    this.memory.update(series?.memory_used_bytes, total, null, bytes, minutes, past.why || why);
    const isDivided = gpu.parent_gpu_uuid !== null || parts.length > 0;
    const whyBusy = past.why || (isDivided ? "not told under MIG" : why || "the driver does not tell");
    this.busy.update(series?.utilization_ratio, 1, null, percent, minutes, whyBusy);
  }
}

function gpuFigures(node, gpu, parts) {
  if (gpu.up === false) return "This GPU does not answer the driver: what it does is unknown.";
  const used = gpu.memory_used_bytes === null ? unknown(whyNoUse(node, gpu)) : bytes(gpu.memory_used_bytes);
  const total = gpu.memory_total_bytes === null ? "an unknown amount" : bytes(gpu.memory_total_bytes);
  const said = [`${used} of ${total} used`];
  if (parts.length) said.push(`divided into ${plural(parts.length, "MIG device")}`);
  if (gpu.pods) said.push(`${bytes(gpu.memory_allocated_bytes)} given to ${plural(gpu.pods, "pod")}`);
  else if (!parts.length) said.push(notGiven(node, "given to no pod"));
  if (gpu.utilization_ratio !== null) said.push(`busy ${percent(gpu.utilization_ratio)} of the time`);
  else if (gpu.sm_utilization_ratio !== null) said.push(`multiprocessors busy ${percent(gpu.sm_utilization_ratio)}`);
  if (gpu.processes_memory_hidden) said.push(`the driver hides the memory of ${plural(gpu.processes_memory_hidden, "process", "processes")}`);
  if (gpu.memory_total_bytes !== null && gpu.memory_allocated_bytes > gpu.memory_total_bytes) said.push("more is given than there is");
  return said.join(" · ");
}

const notGiven = (node, known) => (whyNoPods(node) ? "given to whom is unknown" : known);

function barText(node, gpu, rows, taken) {
  const over = rows.filter(({ on }) => on.memory_limit_bytes !== null && on.memory_used_bytes > on.memory_limit_bytes).length;
  const none = rows.filter(({ on }) => on.memory_used_bytes === null).length;
  const parts = [`Memory of ${gpuName(gpu)} by pod: ${whyNoPods(node) ? "pods unknown" : plural(rows.length, "pod")}`];
  if (over) parts.push(`${over} above the memory limit`);
  if (none) parts.push(`use of ${none} unknown`);
  if (gpu.memory_total_bytes !== null && taken < gpu.memory_total_bytes) parts.push(`${bytes(gpu.memory_total_bytes - taken)} ${notGiven(node, "not given")}`);
  return `${parts.join(", ")}. The table of pods has the amounts.`;
}

// --- pods ---

const LIMITS = { memory: "memory limit", compute: "compute limit" };

function breachText(resource) {
  return resource in LIMITS ? `over its ${LIMITS[resource]}` : "uses a GPU that it was not given";
}

class PodRow {
  constructor() {
    this.name = make("bdi");
    this.of = make("span", { class: "of" });
    this.gpuName = make("span");
    this.memory = new Amount("memory");
    this.compute = new Amount("compute");
    this.states = make("div");
    this.element = make(
      "tr",
      { role: "row" },
      make("th", { role: "rowheader", scope: "row" }, this.name, this.of),
      make("td", { role: "cell", "data-column": "GPU" }, this.gpuName),
      make("td", { role: "cell", "data-column": "Memory" }, this.memory.element),
      make("td", { role: "cell", "data-column": "Compute" }, this.compute.element),
      make("td", { role: "cell", "data-column": "Limits" }, this.states),
    );
  }

  update(node, { pod, on, gpu, words }, past) {
    this.words = words;
    say(this.name, visible(pod.pod));
    const more = [visible(pod.namespace)];
    if (pod.queue) more.push(`queue ${visible(pod.queue)}`);
    if (pod.role === "system") more.push("part of a sharing system");
    say(this.of, more.join(" · "));
    say(this.gpuName, place(on, gpu));
    const series = past.pods.get(`${pod.pod_uid} ${on.gpu_uuid}`);
    const whyTime = on.sm_utilization_ratio === null ? whyNoTime(node, gpu) : `no full ${duration(node.compute_window_seconds)} yet`;
    this.memory.update(on.memory_used_bytes, on.memory_limit_bytes, bytes, whyNoUse(node, gpu), series?.memory_used_bytes, null, past);
    this.compute.update(on.sm_utilization_mean_ratio, on.compute_limit_ratio, percent, whyTime, series?.sm_utilization_ratio, on.compute_limit_ratio ?? 1, past);
    this.element.classList.toggle("breach", inBreach(on));
    this.say(node, on);
  }

  say(node, on) {
    const lines = stateLines(node, on);
    const key = JSON.stringify(lines);
    if (key === this.said) return;
    this.said = key;
    this.states.replaceChildren(...lines.map(([kind, text]) => make("span", { class: `state ${kind}` }, text)));
  }
}

class Amount {
  constructor(title) {
    this.text = make("span");
    this.of = make("span", { class: "of" });
    this.meter = new Meter("meter");
    this.plot = new Plot(title);
    const now = make("div", {}, this.text, this.of, this.meter.element);
    this.element = make("div", { class: "amount" }, now, this.plot.element);
  }

  update(used, limit, format, why, series, top, past) {
    say(this.text, used === null ? "unknown" : limit === null ? format(used) : useOfLimit(used, limit, format));
    this.text.classList.toggle("unknown", used === null);
    say(this.of, used !== null ? (limit === null ? "no limit" : "") : [why, limit === null ? "" : `limit ${format(limit)}`].filter(Boolean).join("; "));
    show(this.of, this.of.textContent !== "");
    show(this.meter.element, used !== null && limit !== null);
    this.meter.update(used, limit);
    const isKnown = Boolean(series?.some((value) => value !== null));
    show(this.plot.element, isKnown);
    if (isKnown) this.plot.update(series, top, limit, format, past.minutes, past.why);
  }
}

const inBreach = (on) => Object.values(on.limit_exceeded).includes(true);

function stateLines(node, on) {
  const lines = [];
  const within = [];
  const open = [];
  for (const [resource, exceeded] of Object.entries(on.limit_exceeded)) {
    if (exceeded === true) lines.push(["bad", `▲ ${breachText(resource)}, for ${breachAge(node, on, resource)}`]);
    else if (exceeded === null) open.push(resource in LIMITS ? LIMITS[resource] : "whether it was given this GPU");
    else if (resource in LIMITS) within.push(LIMITS[resource]);
  }
  if (within.length && !lines.length) lines.push(["good", open.length ? `✓ within its ${within.join(" and ")}` : "✓ within its limits"]);
  if (open.length) lines.push(["unknown", `? unknown: ${open.join(", ")}`]);
  if (!lines.length) lines.push(["quiet", "no limit"]);
  return lines;
}

function breachAge(node, on, resource) {
  const since = on.limit_exceeded_since_timestamp_seconds[resource];
  return since === null || since === undefined ? "an unknown time" : duration(node.last_sample_timestamp_seconds - since);
}

function podRows(node) {
  const gpus = new Map((node.gpus ?? []).map((gpu) => [gpu.gpu_uuid, gpu]));
  for (const gpu of gpus.values()) {
    const parent = gpus.get(gpu.parent_gpu_uuid);
    gpu.parentName = parent ? gpuName(parent) : null;
  }
  const rows = [];
  for (const pod of node.pods ?? []) {
    for (const on of pod.gpus) {
      const gpu = gpus.get(on.gpu_uuid);
      const text = [pod.namespace, pod.pod, pod.queue, on.gpu_uuid, gpu?.parentName ?? "", gpu ? gpuName(gpu) : ""];
      rows.push({ key: `${pod.pod_uid} ${on.gpu_uuid}`, pod, on, gpu, words: text.join(" ").toLowerCase() });
    }
  }
  // The answer is sorted by namespace and name, and sorting is stable.
  return rows.sort((one, other) => inBreach(other.on) - inBreach(one.on));
}

// Pods that run a sharing system and use nothing say nothing.
const isWorthARow = ({ pod, on }) => pod.role !== "system" || on.memory_used_bytes !== 0 || inBreach(on);

// --- breaches, contracts, sources ---

class BreachView {
  constructor() {
    this.who = make("strong");
    this.what = make("span");
    this.element = make("li", {}, this.who, this.what);
  }

  update(node, { pod, on, gpu }) {
    const resources = Object.keys(on.limit_exceeded).filter((resource) => on.limit_exceeded[resource]);
    say(this.who, `▲ ${visible(pod.namespace)}/${visible(pod.pod)}`);
    const amounts = resources.map((resource) => `${breachText(resource)} for ${breachAge(node, on, resource)}: ${breachAmount(node, on, resource)}`);
    say(this.what, ` on ${place(on, gpu)} ${amounts.join("; ")}`);
  }
}

function breachAmount(node, on, resource) {
  if (!(resource in LIMITS)) return on.memory_used_bytes === null ? "memory unknown" : bytes(on.memory_used_bytes);
  const [used, limit, format] = resource === "memory" ? ["memory_used_bytes", "memory_limit_bytes", bytes] : ["sm_utilization_mean_ratio", "compute_limit_ratio", percent];
  // A container may be above its own limit while the pod is below the sum.
  const isAbove = on[used] !== null && on[limit] !== null && on[used] > on[limit];
  const container = isAbove ? undefined : on.containers.find((each) => each.limit_exceeded[resource] === true);
  const of = container ?? on;
  const amount = (container ? `container ${visible(container.container)}: ` : "") + useOfLimit(of[used], of[limit], format);
  return resource === "memory" ? amount : `${amount}, mean of ${duration(node.compute_window_seconds)}`;
}

function place(on, gpu) {
  if (!gpu) return visible(on.gpu_uuid);
  return gpu.parentName ? `${gpu.parentName}, ${gpuName(gpu)}` : gpuName(gpu);
}

class ErrorView {
  constructor() {
    this.element = make("li");
  }

  update(error) {
    say(this.element, `${visible(error.namespace)}/${visible(error.pod)}, ${visible(error.system)}: ${error.errors.map(visible).join("; ")}`);
  }
}

class SourceRow {
  constructor() {
    const cell = (column) => make("td", { role: "cell", "data-column": column });
    this.name = make("th", { role: "rowheader", scope: "row" });
    this.state = make("span");
    this.read = cell("Last read");
    this.took = cell("Took");
    this.failures = cell("Failures");
    const state = cell("State");
    state.append(this.state);
    this.element = make("tr", { role: "row" }, this.name, state, this.read, this.took, this.failures);
  }

  update(node, source) {
    say(this.name, source.source);
    say(this.state, source.up ? "✓ read" : `▲ not read: ${visible(source.reason ?? "no reason is known")}`);
    this.state.className = `state ${source.up ? "good" : "bad"}`;
    this.element.classList.toggle("breach", !source.up);
    const last = source.last_success_timestamp_seconds;
    const now = node.last_sample_timestamp_seconds === null ? null : node.last_sample_timestamp_seconds + (node.last_sample_age_seconds ?? 0);
    say(this.read, last === null ? "never" : now === null ? "unknown" : `${duration(now - last)} ago`);
    say(this.took, source.read_duration_seconds === null ? "unknown" : `${(source.read_duration_seconds * 1000).toFixed(1)} ms`);
    say(this.failures, String(source.errors_total));
  }
}

// --- the page ---

const breachViews = new Children(at("breaches"), () => new BreachView());
const gpuViews = new Children(at("gpus"), () => new GpuView());
const podViews = new Children(at("pods").tBodies[0], () => new PodRow());
const errorViews = new Children(at("errors"), () => new ErrorView());
const sourceViews = new Children(at("sources").tBodies[0], () => new SourceRow());

const NO_PAST = { gpus: new Map(), pods: new Map(), minutes: 15, why: "its past is not read yet" };
let node = null;
let past = NO_PAST;
let answeredAt = null;
let failure = null;
let isBroken = false;
let isAsking = false;
let timer = null;

function showNode() {
  const rows = podRows(node);
  const isKnown = node.gpus !== null;
  say(at("node"), visible(node.node || "node without a name"));
  show(at("simulated"), node.simulated);
  say(at("version"), node.version);
  say(at("window"), `mean of ${duration(node.compute_window_seconds)}; last ${quantity(past.minutes, "min")}`);
  say(at("minutes"), `now; last ${quantity(past.minutes, "min")}`);

  const breaches = rows.filter(({ on }) => inBreach(on));
  breachViews.update(breaches.slice(0, MAX_BREACHES).map((row) => [row.key, node, row]));
  say(at("more-breaches"), `and ${breaches.length - MAX_BREACHES} more: they stand first in the table of pods`);
  show(at("more-breaches"), breaches.length > MAX_BREACHES);
  say(at("no-breach"), isKnown ? noBreach(node, rows) : "Unknown.");
  show(at("no-breach"), breaches.length === 0);
  announce(isKnown ? countPods(breaches) : null);

  showGpus(rows);
  const shown = rows.filter(isWorthARow);
  podViews.update(shown.map((row) => [row.key, node, row, past]));
  filter();

  errorViews.update((node.claim_errors ?? []).map((error) => [`${error.namespace}/${error.pod} ${error.system}`, error]));
  show(at("errors-section"), Boolean(node.claim_errors?.length));
  sourceViews.update(node.sources.map((source) => [source.source, node, source]));
  say(at("node-facts"), nodeFacts());
  show(at("view"), true);
}

// A pod on two GPUs has two rows.
const countPods = (rows) => new Set(rows.map(({ pod }) => pod.pod_uid)).size;

function noBreach(node, rows) {
  const why = whyNoPods(node);
  if (why) return `Unknown: ${why}.`;
  const isOpen = (on, resources) => resources.some((resource) => on.limit_exceeded[resource] === null);
  const open = countPods(rows.filter(({ on }) => isOpen(on, ["memory", "unallocated"])));
  if (open) return `No breach is known; of ${plural(open, "pod")} it is unknown.`;
  const openCompute = countPods(rows.filter(({ on }) => isOpen(on, ["compute"])));
  if (openCompute) return `No pod takes more memory than it was given; for compute, of ${plural(openCompute, "pod")} it is unknown.`;
  return "No pod takes more than it was given.";
}

function showGpus(rows) {
  const gpus = node.gpus ?? [];
  const byGpu = new Map(gpus.map((gpu) => [gpu.gpu_uuid, []]));
  for (const row of rows) byGpu.get(row.on.gpu_uuid)?.push(row);
  const order = (one, other) => (one.gpu ?? Infinity) - (other.gpu ?? Infinity) || 0;
  const parts = (gpu) => gpus.filter((each) => each.parent_gpu_uuid === gpu.gpu_uuid).sort(order);
  const tops = gpus.filter((gpu) => !byGpu.has(gpu.parent_gpu_uuid)).sort(order);
  const listed = tops.flatMap((gpu) => [gpu, ...parts(gpu)]);
  gpuViews.update(listed.map((gpu) => [gpu.gpu_uuid, node, gpu, byGpu.get(gpu.gpu_uuid), parts(gpu), past]));
  say(at("no-gpu"), node.gpus === null ? "Unknown." : node.gpus_unidentified === null ? "Unknown: the driver is not read." : "The driver lists no GPU.");
  show(at("no-gpu"), gpus.length === 0);
}

function nodeFacts() {
  const facts = [`driver ${node.driver_version === null ? "unknown" : visible(node.driver_version)}`];
  if (node.gpus_unidentified) facts.push(`${plural(node.gpus_unidentified, "device")} that the driver counts and cannot name`);
  if (node.pods_dropped) facts.push(`${plural(node.pods_dropped, "pod")} left out, because there would be too many series (--max-series)`);
  if (past.leftOut) facts.push(`the past of ${plural(past.leftOut, "pod")} is not kept`);
  const dropped = Object.entries(node.dropped_samples_total ?? {}).filter(([, count]) => count > 0);
  for (const [reason, count] of dropped) facts.push(`dropped, ${visible(reason)}: ${count}`);
  return facts.join(" · ");
}

function filter() {
  const wanted = at("wanted").value.trim().toLowerCase();
  let count = 0;
  for (const row of podViews.views.values()) {
    const isWanted = row.words.includes(wanted);
    show(row.element, isWanted);
    count += isWanted;
  }
  const all = podViews.views.size;
  const isKnown = node !== null && node.pods !== null;
  say(at("shown"), !isKnown ? "Pods: unknown." : wanted ? `${count} of ${plural(all, "row")}` : all ? plural(all, "row") : noPods());
}

function noPods() {
  const why = whyNoPods(node);
  return why ? `Pods: unknown, ${why}.` : "No pod has to do with a GPU.";
}

let announced = null;

function announce(count) {
  const mark = count === null || isBroken ? "? · " : count ? `${plural(count, "pod")} in breach · ` : "";
  document.title = `${mark}${visible(node.node || "node without a name")} · fgpu-exporter`;
  if (count === announced) return;
  if (announced !== null || count) say(at("announcement"), count === null ? "Breaches are unknown." : `${plural(count, "pod")} in breach.`);
  announced = count;
}

// --- what is wrong, in words ---

function problem() {
  if (failure) {
    const old = node === null ? "" : ` What stands below is from ${clockTime(answeredAt.wall)} and may be untrue by now.`;
    return `The exporter does not answer: ${failure}.${old} This page keeps trying.`;
  }
  if (node === null || node.gpus !== null) return "";
  const down = node.sources.filter((source) => !source.up && source.reason).map((source) => `${source.source}: ${visible(source.reason)}`);
  const because = down.length ? ` (${down.join("; ")})` : "";
  if (node.last_sample_timestamp_seconds === null) return `There is no sample of this node yet${because}. All that is measured is unknown.`;
  return `The newest sample is too old to be believed${because}. All that is measured is unknown until samples come again.`;
}

function sampleAge() {
  return (node.last_sample_age_seconds ?? 0) + (performance.now() - answeredAt.monotonic) / 1000;
}

function advice() {
  if (node !== null && node.version !== VERSION) {
    return `The exporter is of version ${node.version} now and this page of version ${VERSION}: reload the page to have the newer one.`;
  }
  return "";
}

// How long it has been so stands apart from the sentence: an age that grows is no news and is not read out.
function age() {
  if (failure) return answeredAt === null ? "" : `Last answer ${duration((performance.now() - answeredAt.monotonic) / 1000)} ago.`;
  return node === null || node.last_sample_timestamp_seconds === null ? "" : `Newest sample ${duration(sampleAge())} ago.`;
}

function tick() {
  isBroken = failure !== null;
  say(at("problem-text"), problem());
  say(at("problem-age"), age());
  show(at("problem"), at("problem-text").textContent !== "");
  say(at("advice"), advice());
  show(at("advice"), at("advice").textContent !== "");
  document.body.classList.toggle("old", isBroken);
  if (node === null) return;
  if (isBroken && !document.title.startsWith("?")) document.title = `? · ${document.title}`;
  const every = `every ${duration(node.sample_interval_seconds)}`;
  say(at("sampled"), node.last_sample_timestamp_seconds === null ? "not sampled yet" : `sampled ${duration(sampleAge())} ago, ${every}`);
}

// --- asking ---

async function ask(path, seconds) {
  const answer = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(seconds * 1000) });
  if (!answer.ok) throw new Error(`${path} answers ${answer.status} ${answer.statusText}`.trim());
  const value = await answer.json();
  if (value.api_version !== API_VERSION) throw new Error(`it speaks version ${visible(String(value.api_version))} of its API, and this page ${API_VERSION}; reload the page`);
  return value;
}

function reason(error) {
  if (error.name === "TimeoutError") return "no answer in time";
  if (error instanceof SyntaxError) return "its answer is not JSON";
  return error instanceof TypeError ? "no connection" : error.message;
}

async function readPast() {
  const answer = await ask("api/v1/history", 10);
  const minutes = (answer.steps * answer.step_seconds) / 60;
  past = {
    gpus: new Map(answer.gpus.map((gpu) => [gpu.gpu_uuid, gpu])),
    pods: new Map(answer.pods.map((pod) => [`${pod.pod_uid} ${pod.gpu_uuid}`, pod])),
    minutes,
    leftOut: answer.pods_left_out,
    why: "",
    nextAt: performance.now() + answer.step_seconds * 1000,
  };
}

async function refresh() {
  if (isAsking) return;
  isAsking = true;
  clearTimeout(timer);
  const interval = node?.sample_interval_seconds ?? 5;
  try {
    node = await ask("api/v1/node", Math.max(5, interval));
    answeredAt = { wall: Date.now(), monotonic: performance.now() };
    if (!(past.nextAt > performance.now())) {
      await readPast().catch((error) => {
        past = { ...NO_PAST, why: `its past cannot be read: ${reason(error)}` };
      });
    }
    failure = null;
    isBroken = false;
  } catch (error) {
    failure = reason(error);
  }
  isAsking = false;
  // A page that no one sees asks nothing.
  if (!document.hidden) timer = setTimeout(refresh, Math.max(1, node?.sample_interval_seconds ?? 5) * 1000);
  if (failure === null) showNode();
  tick();
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) refresh();
});
at("wanted").addEventListener("input", filter);
setInterval(tick, 1000);
refresh();
