"use strict";
// The page of runs. `page.live`: the dashboard, which is asked for everything; else all is in the page.
const byId = (id) => document.getElementById(id);
const page = JSON.parse(byId("data").textContent);
const loaded = new Map(page.runs.map((run) => [run.name, run]));
let list = page.runs;
const view = { focus: page.runs[0]?.name, compared: new Set(page.runs.length > 1 ? page.runs.slice(0, 6).map((run) => run.name) : []),
  pinned: null, smoothing: 0, of: "", filter: "all", text: "", chosen: 0, extra: new Set() };
const lastOf = (values) => values.findLast((value) => value != null);
const whole = (text) => text.replaceAll(" ", "\u00a0"); // no line ends between a number and its unit
const counted = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

/** Build an element. Children become text nodes: what a model wrote is never markup. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") for (const [key, own] of Object.entries(value)) element.style.setProperty(key, own);
    else if (name === "act") element.onclick = value;
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child != null && child !== false));
  return element;
}
const soft = (...text) => make("span", { class: "soft" }, ...text);
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const faint = (name, share) => `color-mix(in srgb, ${color(name)} ${share}%, transparent)`;

const inTwo = (value, size, big, small) => whole(`${Math.floor(Math.round(value) / size)} ${big} ${Math.round(value) % size} ${small}`);
const FORMATS = {
  plain: (value) => (Math.abs(value) < 1e-12 ? "0" : Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : Math.abs(value) >= 100 ? value.toFixed(0)
    : Math.abs(value) >= 10 ? value.toFixed(1) : Math.abs(value) >= 0.01 ? value.toFixed(2) : value.toExponential(0).replace("e-", "e−")),
  percent: (value) => whole(`${Math.round(100 * value)} %`),
  seconds: (value) => (value >= 172800 ? inTwo(value / 3600, 24, "d", "h") : value >= 3599.5 ? inTwo(value / 60, 60, "h", "min")
    : value >= 100 ? inTwo(value, 60, "min", "s") : whole(value >= 10 || value < 0.05 ? `${Math.round(value)} s` : `${value.toFixed(1)} s`)),
  gib: (value) => whole(`${value.toFixed(1)} GiB`),
};
const tick = (value) => (value && Math.abs(value) < 1e-3 ? value.toExponential().replace("e-", "e−") : String(+value.toPrecision(6)));
const two = (value) => (Math.abs(value) < 10 ? value.toFixed(2) : FORMATS.plain(value));
const MOST_LINES = 12, MOST_BEGUN = 20, COLORS = "abcdef", DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3]], STROKES = ["solid", "dashed", "dotted", "double"];
const GOOD = ["complete"], BAD = ["failed", "lost", "cancelled", "crash", "node_lost", "walltime", "killed", "config", "bringup_failed"], BUSY = ["training", "starting", "running"];
const moodOf = (state) => (GOOD.includes(state) ? "good" : BAD.includes(state) ? "bad" : BUSY.includes(state) ? "busy" : "");
const shapeOf = (state) => ({ good: "✓", bad: "✗", busy: "●" })[moodOf(state)] ?? "○";
const PHASE_COLORS = { "bringing up Ray": "ink", "loading the model": "soft", generate: "b", train: "a", publish: "c", eval: "d", checkpoint: "e", other: "f" };
const phaseOf = (name) => name.replace(/^time\/|_s$/g, "").replace("generate_wait", "generate");
const keyOf = (name) => ({ "--key": `var(--${name})` });

// What is drawn ------------------------------------------------------------------------------------------------------

const focus = () => loaded.get(view.focus);
const compared = () => [...view.compared].map((name) => loaded.get(name)).filter(Boolean);
const isComparing = () => compared().length > 1;
const PASS = "eval/pass@1";
let steps = [], drawn = [], signature = "";

/** The charts of a run, those with a value: first what was learned. */
function chartsOf(run) {
  const bounds = new Set(Object.values(run.bounds).flat());
  const names = Object.keys(run.metrics).filter((name) => !bounds.has(name) && name !== "time").sort();
  const matching = (pattern, label = "$1") => names.filter((name) => pattern.test(name)).map((name, index) => (
    { name, label: name.replace(pattern, label), color: COLORS[index % 6], dash: index % 4, points: name.startsWith("eval/") }));
  const one = (name, hue) => [{ name, color: hue }];
  const hero = [{ name: PASS, label: "pass@1, held out", color: "a", points: true, width: 2.5 }, { name: "reward/mean", label: "reward, training", color: "b", width: 1.5 }];
  const hasHero = hero.some((line) => run.metrics[line.name]);
  const phases = names.filter((name) => /^time\/(?!step_s|eta_s|inputs|connect|start|resume|weights).*_s$/.test(name));
  const parts = matching(/^reward\/(?!(?:mean|solved_fraction|zero_variance_fraction|invalid_fraction|over_budget_fraction)$)(.+)$/);
  const charts = [
    { id: "learned", title: "What was learned", hero: true, share: true, lines: hasHero ? hero : [{ name: "loss/policy", label: "loss", color: "a", width: 2.5 }] },
    { id: "solved", title: "Completions that are right", range: [0, 1], format: "percent", lines: one("reward/solved_fraction", "c") },
    { id: "passes", title: "Evals, pass@k", share: true, lines: matching(/^eval\/(?!pass@1$)((?:[^/]+\/)?pass@\d+.*)$/) },
    { id: "parts", title: "Parts of the reward", lines: parts.length > 1 ? parts : [] },
    { id: "tokens", title: "Tokens of a completion", from: 0, lines: one("tokens/completion_mean", "d") },
    { id: "cut", title: "Completions cut off at the limit", range: [0, 1], format: "percent", lines: one("tokens/truncated_fraction", "b") },
    { id: "alike", title: "Groups whose rewards are all equal", range: [0, 1], format: "percent", lines: one("reward/zero_variance_fraction", "f") },
    { id: "turns", title: "Turns of an episode", from: 0, lines: one("episode/turns", "d") },
    { id: "episodes", title: "Episodes", from: 0, lines: matching(/^episode\/(?!turns$)(.+)$/) },
    { id: "entropy", title: "Entropy, nats a token", from: 0, lines: one("policy/entropy", "c") },
    { id: "gradient", title: "Gradient norm", from: 0, lines: one("grad_norm", "a") },
    { id: "loss", title: "Loss", lines: hasHero ? one("loss/policy", "f") : [] },
    { id: "lag", title: "Policy lag, optimizer steps", from: 0, lines: matching(/^lag\/(.+)$/) },
    { id: "mismatch", title: "Engine against learner, nats a token", from: 0, lines: one("mismatch/logprob_abs_diff_mean", "b") },
    { id: "correction", title: "Correction of the mismatch", lines: matching(/^correction\/(clipped_fraction|masked_fraction|ess)$/) },
    { id: "speed", title: "Tokens per second", from: 0, lines: one("throughput/tokens_per_s", "c") },
    { id: "phases", title: "Seconds of a step", from: 0, format: "seconds", stacked: true, lines: phases.map((name) => ({ name, label: phaseOf(name), color: PHASE_COLORS[phaseOf(name)] ?? "f" })) },
    { id: "nodes", title: "Busy seconds of a step, by node", from: 0, format: "seconds", lines: matching(/^node\/(train|sample)_s\/(.+)$/, "$2 $1") },
    { id: "memory", title: "Memory", from: 0, format: "gib", lines: matching(/^process\/memory_gib\/(.+)$/) },
    { id: "cores", title: "CPU cores in use", from: 0, lines: matching(/^process\/cpu_cores\/(.+)$/) },
    { id: "gpu-memory", title: "GPU memory", from: 0, format: "gib", lines: matching(/^process\/gpu_memory_gib\/(.+)$/) },
    { id: "gpus", title: "GPU utilization", range: [0, 1], format: "percent", lines: matching(/^process\/gpu_utilization\/(.+)$/) },
    ...[...view.extra].map((name) => ({ id: `extra-${name}`, title: name, lines: one(name, "a") })),
  ];
  for (const chart of charts) chart.lines = chart.lines.filter((line) => run.metrics[line.name]?.[0].some((value, index) => value != null && !(chart.stacked && run.steps[index] === 0))).slice(0, MOST_LINES).map((line) => ({ ...line, of: run.name }));
  return { charts: charts.filter((chart) => chart.lines.length), names };
}

/** The same charts with a line for each run: of a chart with several lines the first. */
function chartsOver(runs) {
  const charts = new Map();
  for (const run of runs) for (const chart of chartsOf(run).charts) if (!charts.has(chart.id)) charts.set(chart.id, chart);
  return [...charts.values()].flatMap((chart) => (chart.id === "learned" ? chart.lines.map((line, index) => (
    { ...chart, id: index ? `learned-${index}` : "learned", hero: !index, title: line.label, lines: [line] })) : [chart]))
    .map((chart) => (chart.stacked ? { ...chart, stacked: false, lines: [{ name: "time/step_s" }] } : chart))
    .map((chart) => ({ ...chart, title: chart.lines.length > 1 ? `${chart.title}: ${chart.lines[0].label}` : chart.title, lines: runs.filter((run) => run.metrics[chart.lines[0].name])
      .map((run) => { const at = runs.indexOf(run); return { name: chart.lines[0].name, of: run.name, label: run.name, color: COLORS[at % 6], dash: at % 4, points: chart.lines[0].points }; }) }))
    .filter((chart) => chart.lines.length);
}

/** The values of a line at `steps`: [mean, low, high], the last two null where it has neither an interval nor a band. */
function valuesOf(line) {
  const run = loaded.get(line.of), rows = run.metrics[line.name] ?? [], bounds = run.bounds[line.name];
  const found = bounds ? [rows[0], run.metrics[bounds[0]]?.[0], run.metrics[bounds[1]]?.[0]] : [rows[0], rows[1], rows[2]];
  if (run.steps === steps) return found;
  const at = new Map(run.steps.map((step, index) => [step, index]));
  return found.map((row) => row && steps.map((step) => (at.has(step) ? row[at.get(step)] : null)));
}

/** Mean over the past with falling weights, without the pull towards 0 at the start. */
function smoothed(values, weight) {
  let sum = 0, norm = 0;
  return values.map((value) => {
    if (value == null) return null;
    sum = sum * weight + value * (1 - weight);
    norm = norm * weight + 1 - weight;
    return sum / norm;
  });
}
const indexAtOrBefore = (values, index) => Math.max(0, values.findLastIndex((value, at) => at <= index && value != null));

/** The columns of a chart: steps, then of each line its value, what was measured, and the bounds of its interval. */
function columns(spec) {
  const nothing = steps.map(() => null), total = steps.map(() => 0), weight = view.smoothing;
  const found = spec.lines.map((line) => {
    const [mean = nothing, low, high] = line.values;
    if (spec.stacked) return [mean.map((value, index) => (steps[index] === 0 ? null : (total[index] += value ?? 0)))];
    const smooths = weight && !line.points;
    return [smooths ? smoothed(mean, weight) : mean, smooths ? mean : nothing, ...(line.hasBand ? [low, high] : [])];
  });
  return [steps, ...(spec.stacked ? found.reverse() : found).flat()]; // stacked: the tallest first, each covers the one before
}

function draw(spec) {
  const keys = spec.lines.map((line) => make("li", { style: { ...keyOf(line.color), "--stroke": STROKES[line.dash ?? 0] }, class: spec.stacked ? "block" : "" }));
  const plot = make("div", { class: "plot", role: "img" });
  byId(spec.hero ? "hero" : "charts").append(make("div", { class: `card chart${spec.hero ? " hero" : ""}`, id: `chart-${spec.id}` },
    make(spec.hero ? "h2" : "h3", {}, spec.title), make("ul", {}, ...keys), plot));
  const format = FORMATS[spec.format ?? "plain"], series = [], bands = [];
  const take = () => { for (const line of spec.lines) { line.values = valuesOf(line); line.hasBand = Boolean(line.values[1]) && !spec.stacked; } };
  take();
  for (const line of spec.lines) {
    const stroke = () => color(line.color);
    series.push({ stroke, width: line.width ?? 2, dash: DASHES[line.dash ?? 0], spanGaps: true, points: { show: line.points ? (self, at, from, to) => self.data[at].slice(from, to + 1).filter((value) => value != null).length * 9 <= self.over.clientWidth : steps.length < 40, size: line.points ? 9 : 5, fill: stroke },
      ...(spec.stacked ? { width: 0, fill: stroke, points: { show: false }, ...(steps.length < 200 && { paths: uPlot.paths.bars({ size: [0.7, 44], radius: 0.08 }) }) } : {}) });
    if (spec.stacked) continue;
    series.push({ stroke: () => faint(line.color, 35), width: 1, spanGaps: true, points: { show: false } });
    if (!line.hasBand) continue;
    series.push(...[0, 1].map(() => ({ stroke: "transparent", width: 0, spanGaps: true, points: { show: false } })));
    bands.push({ series: [series.length, series.length - 1], fill: () => faint(line.color, 16) });
  }
  if (spec.stacked) series.reverse();
  const isShare = spec.share && spec.lines.every((line) => line.values[0].every((value) => value == null || (value >= 0 && value <= 1)));
  const range = spec.range ?? (isShare ? [0, 1] : null), room = () => Math.max(0.4, (steps.at(-1) - steps[0]) * 0.01);
  const axis = { stroke: () => color("soft"), font: "11px system-ui, sans-serif", ticks: { show: false }, border: { show: false } };
  const chart = new uPlot({
    width: plot.clientWidth, height: plot.clientHeight, series: [{}, ...series], bands, legend: { show: false }, padding: [10, steps.at(-1) >= 1e4 ? 26 : 6, 0, 0],
    scales: { x: { time: false, range: (_, low, high) => [low <= steps[0] ? steps[0] - room() : low, high >= steps.at(-1) ? steps.at(-1) + room() : high] },
      y: { range: (_, low, high) => range ?? (spec.from === 0 ? [0, (high || 1) * 1.12] : low || high ? uPlot.rangeNum(low, high, 0.15, true) : [0, 1]) } },
    axes: [{ ...axis, size: 26, gap: 4, space: 60, grid: { show: false }, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6] },
      { ...axis, size: (_, shown) => Math.max(48, ...(shown ?? []).map((own) => 16 + 6.2 * own.length)), gap: 6, space: spec.hero ? 44 : 34, grid: { stroke: () => color("grid"), width: 1 }, values: (_, ticks) => ticks.map(spec.format ? format : tick) }],
    cursor: { y: false, sync: { key: "steps" }, drag: { x: true, y: false, dist: 6, click: () => {} }, points: spec.stacked ? { show: false } : { size: 9 },
      move: (self, left, top) => [left < 0 ? left : self.valToPos(steps[self.posToIdx(left)], "x"), top],
      dataIdx: (self, of, index) => indexAtOrBefore(self.data[of], index) },
    hooks: {
      setCursor: [(self) => write(self.cursor.idx ?? pinnedIndex())],
      setScale: [(self, key) => { if (key === "x") byId("whole").hidden = self.scales.x.min <= steps[0] && self.scales.x.max >= steps.at(-1); }],
      drawClear: [(self) => { // where attempts began, and the pinned step
        const line = (step, fill, height) => {
          const x = Math.round(self.valToPos(step, "x", true) - devicePixelRatio / 2);
          self.ctx.fillStyle = fill;
          if (x >= self.bbox.left) for (let y = 0; y < self.bbox.height; y += 2 * height) self.ctx.fillRect(x, self.bbox.top + y, devicePixelRatio, height);
        };
        const { attempts } = loaded.get(spec.lines[0].of);
        if (!isComparing() && attempts.length <= MOST_BEGUN) for (const attempt of attempts.slice(1)) line(attempt.first_step + 0.5, color("g"), 4 * devicePixelRatio);
        line(steps[pinnedIndex()], faint("a", 45), self.bbox.height);
      }],
    },
  }, columns(spec), plot);

  /** Write what the lines say at a step, or did last before it. */
  function write(index) {
    spec.lines.forEach((line, number) => {
      const [mean, low, high] = line.values, bounds = loaded.get(line.of).bounds[line.name];
      const at = spec.stacked ? index : indexAtOrBefore(mean, index);
      keys[number].replaceChildren(soft(line.label ? `${line.label} ` : `step ${steps[at]} `), make("b", {}, mean[at] == null ? "–" : format(mean[at])),
        bounds && low?.[at] != null ? ` [${format(low[at])}, ${format(high[at])}]` : "");
    });
  }
  const said = spec.lines.map((line) => [line.label ?? "", line.values[0].find((value) => value != null), lastOf(line.values[0])]).filter(([, from]) => from != null);
  plot.setAttribute("aria-label", `${spec.title}: ${said.map(([label, from, to]) => `${label} from ${format(from)} to ${format(to)}`).join(", ")}.`);
  let down = 0; // uPlot would take a click for a drag, since the cursor jumps to the next step
  chart.over.onmousedown = (event) => { down = event.clientX; };
  chart.over.onclick = (event) => { if (Math.abs(event.clientX - down) < 6 && chart.cursor.idx != null) pin(steps[chart.cursor.idx]); };
  const observer = new ResizeObserver(() => chart.setSize({ width: plot.clientWidth, height: plot.clientHeight }));
  observer.observe(plot);
  drawn.push({ chart, write, renew: () => { take(); chart.setData(columns(spec), false); chart.redraw(); write(pinnedIndex()); }, end: () => { observer.disconnect(); chart.destroy(); } });
}

const pinnedIndex = () => (view.pinned == null ? steps.length - 1 : Math.max(0, steps.findLastIndex((step) => step <= view.pinned)));
function pin(step) {
  view.pinned = step >= steps.at(-1) ? null : step;
  byId("step").value = pinnedIndex();
  byId("step-now").textContent = steps[pinnedIndex()] ?? "–";
  for (const { chart, write } of drawn) { write(pinnedIndex()); chart.redraw(false); }
  if (!view.of.startsWith("eval")) showPrompts();
}
function zoom(min, max) { for (const { chart } of drawn) chart.setScale("x", { min, max }); }

function tile(run, title, name, chart, format, better) {
  const values = (run.metrics[name]?.[0] ?? []).filter((value) => value != null);
  if (!values.length) return;
  const part = name === PASS ? 1 : Math.ceil(values.length / 10), sum = (own) => own.reduce((total, value) => total + value, 0);
  const unit = format === "percent" ? 0.01 : 1e-9, change = Math.round((sum(values.slice(-part)) - sum(values.slice(0, part))) / part / unit) * unit;
  const low = Math.min(...values), high = Math.max(...values), y = (value) => 28 - (26 * (value - low)) / (high - low || 1);
  const said = format === "percent" ? `${Math.round(100 * Math.abs(change))} points` : FORMATS[format](Math.abs(change));
  const isNoise = name !== PASS && Math.abs(change) < 0.02 * Math.max(Math.abs(low), Math.abs(high));
  const verdict = !better || !change || isNoise ? "" : Math.sign(change) === better ? ", better" : ", worse";
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg"), path = document.createElementNS(svg.namespaceURI, "path");
  for (const [key, value] of Object.entries({ viewBox: "0 0 100 30", preserveAspectRatio: "none", "aria-hidden": "true" })) svg.setAttribute(key, value);
  path.setAttribute("d", `M${values.map((value, index) => `${((100 * index) / (values.length - 1 || 1)).toFixed(2)} ${y(value).toFixed(2)}`).join("L")}`);
  svg.append(path);
  byId("tiles").append(make("a", { class: "card tile", href: `#chart-${chart}`, act: (event) => { event.preventDefault(); byId(`chart-${chart}`)?.scrollIntoView(); } }, soft(title), make("b", {}, FORMATS[format](values.at(-1))),
    make("span", { style: verdict ? { color: `var(--${verdict === ", better" ? "right" : "wrong"})` } : {} }, `${change > 0 ? "▲" : change < 0 ? "▼" : "="} ${said}${verdict}`), svg));
}

// Rollouts -----------------------------------------------------------------------------------------------------------

/** What all prompts begin and end with says nothing: show what is between. */
function tellingPart(texts) {
  const words = texts.map((text) => text.split(/(?<=\s)/));
  let start = 0, end = 0;
  const shortest = Math.min(...words.map((own) => own.length));
  if (texts.length > 1) {
    while (start < shortest - 1 && words.every((own) => own[start] === words[0][start])) start++;
    while (end < shortest - start - 1 && words.every((own) => own.at(-1 - end) === words[0].at(-1 - end))) end++;
  }
  if (new Set(texts).size === 1) start = end = 0;
  return words.map((own) => own.slice(start, own.length - end).join("").trim().replace(/[.,;:]$/, "").slice(0, 300));
}
const VERDICTS = { true: ["right", "✓"], false: ["wrong", "✗"], null: ["unknown", "?"] };
const marks = (answers) => make("span", { class: "marks" }, make("span", { class: "hidden" }, `${answers.filter((answer) => answer.right).length} of ${answers.length} right`),
  answers.slice(0, 16).map((answer) => make("span", { class: `mark ${VERDICTS[answer.right][0]}`, "aria-hidden": "true" }, VERDICTS[answer.right][1])), answers.length > 16 && soft(`+${answers.length - 16}`));
function completion(answer) {
  const signed = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(2)}`;
  const parts = Object.entries(answer.parts), own = [].concat(answer.advantage ?? []).map((value) => (typeof value === "number" ? signed(value) : "–"));
  const about = [answer.reward != null && `reward ${two(answer.reward)}`, ...(parts.length > 1 ? parts.map(([name, value]) => `${name} ${value == null ? "–" : two(value)}`) : []),
    own.length && `advantage ${(new Set(own).size === 1 ? own.slice(0, 1) : own).join(", ")}`, answer.tokens != null && counted(answer.tokens, "token"), answer.turns.length > 0 && counted(answer.turns.length, "turn"), ...answer.why].filter(Boolean);
  const [verdict, shape] = VERDICTS[answer.right], says = { right: "right", wrong: "wrong", unknown: "not judged" }[verdict];
  const said = (who, text, kind) => make("div", { class: `turn ${kind}` }, make("span", {}, who), make("pre", {}, text || "(empty)"));
  const turn = ({ observation, text, reward }, index) => [
    index > 0 && said("environment", observation, ""), said(`model${reward == null ? "" : ` · reward ${two(reward)}`}`, text, "model")];
  return make("div", { class: `answer ${verdict}` }, answer.turns.length ? answer.turns.flatMap(turn) : make("pre", {}, answer.text || "(empty)"),
    make("p", {}, make("strong", {}, `${shape} ${says}`), about.map((text) => make("span", {}, text))));
}

const share = (answers) => answers.filter((answer) => answer.right).length / answers.length;
const change = (prompt) => share(prompt.evals.at(-1)) - share(prompt.evals[0]);
const HELD_OUT = { all: () => true, better: (prompt) => change(prompt) > 0, "still wrong": (prompt) => share(prompt.evals.at(-1)) === 0 && change(prompt) === 0, worse: (prompt) => change(prompt) < 0 };
const TRAINING = { all: () => true, mixed: (prompt) => share(prompt.answers) % 1 !== 0, "all right": (prompt) => share(prompt.answers) === 1, "all wrong": (prompt) => share(prompt.answers) === 0 };

const cache = new Map();
/** The groups of a step: out of the page, or from the dashboard. */
async function groupsOf(run, step) {
  const key = `${run.name} ${run.attempts.length} ${step}`;
  if (!cache.has(key)) {
    if (cache.size > 20) cache.delete(cache.keys().next().value);
    if (page.live) cache.set(key, await ask(`rollouts?run=${encodeURIComponent(run.name)}&step=${step}`));
    else {
      if (document.readyState === "loading") await new Promise((resolve) => document.addEventListener("DOMContentLoaded", resolve, { once: true }));
      cache.set(key, JSON.parse(byId(`rollouts-${page.runs.indexOf(run)}-${step}`)?.textContent ?? "[]"));
    }
  }
  return cache.get(key);
}

let asked = 0;
async function showPrompts() {
  const run = focus(), turn = ++asked, sets = run?.held_out;
  if (!run) return; // on its way
  const of = sets.find((each) => `eval ${each.set}` === view.of), filters = of ? HELD_OUT : TRAINING;
  const step = run.rollout_steps.findLast((own) => own <= (steps[pinnedIndex()] ?? 0)) ?? run.rollout_steps[0];
  byId("rollouts").hidden = !sets.length && step == null;
  if (byId("rollouts").hidden) return;
  const prompts = of ? of.prompts : step == null ? [] : await groupsOf(run, step).catch((error) => { byId("link").textContent = `Step ${step}: ${error.message}`; return []; });
  if (turn !== asked) return; // another step was chosen meanwhile
  if (!(view.filter in filters)) view.filter = "all";
  const again = (act) => () => { const held = document.activeElement?.textContent; act(); view.chosen = 0; showPrompts().then(() => [...byId("tools").querySelectorAll("button")].find((own) => own.textContent === held)?.focus()); };
  const button = (text, pressed, act) => make("button", { class: "button", "aria-pressed": pressed, act: again(act) }, text);
  byId("tools").querySelectorAll("button, span").forEach((element) => element.remove());
  byId("tools").prepend(
    ...sets.map((each) => button(`Held-out prompts through time${each.set ? `: ${each.set}` : ""}`, of === each, () => { view.of = `eval ${each.set}`; })),
    ...(step == null ? [] : [button("Training, by step", !of, () => { view.of = "training"; })]), soft("show"),
    ...Object.keys(filters).map((name) => button(`${name} ${prompts.filter(filters[name]).length}`, view.filter === name, () => { view.filter = name; })));
  const some = run.num_rollout_steps > run.rollout_steps.length ? `; ${run.rollout_steps.length} of ${run.num_rollout_steps} steps are in this file` : "";
  byId("rollouts-note").textContent = of ? `${run.name}: ${counted(of.prompts.length, "held-out prompt")}; columns are the evals at step ${of.steps.join(", ")}`
    : step == null ? "none on disk" : `${run.name}, step ${step}: ${counted(prompts.length, "prompt")}; choose the step above or in a curve${some}`;
  const labels = tellingPart(prompts.map((prompt) => prompt.asked)), answers = (prompt) => (of ? prompt.evals.flat() : prompt.answers);
  const shown = prompts.map((prompt, index) => ({ prompt, label: labels[index] })).filter(({ prompt }) => filters[view.filter](prompt)
    && (!view.text || (prompt.asked + answers(prompt).map((answer) => answer.text).join("\n")).toLowerCase().includes(view.text)));
  if (of) shown.sort((one, other) => change(other.prompt) - change(one.prompt));
  const choose = (index) => {
    view.chosen = index;
    [...byId("prompts").children].forEach((element, own) => element.setAttribute("aria-current", own === index));
    showDetail(shown[index]?.prompt, of);
  };
  byId("prompts").replaceChildren(...shown.map(({ prompt, label }, index) => make("button", { "aria-current": index === view.chosen, act: () => { if (page.live && !of) view.pinned ??= steps[pinnedIndex()]; choose(index); } },
    make("span", { class: "text" }, label || "(empty)", soft(prompt.answer == null ? "" : ` → ${prompt.answer.split("####").at(-1).trim()}`)), of ? prompt.evals.map(marks) : marks(prompt.answers))));
  byId("prompts").onkeydown = (event) => {
    const move = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!move || !shown.length) return;
    event.preventDefault();
    choose(Math.max(0, Math.min(shown.length - 1, view.chosen + move)));
    byId("prompts").children[view.chosen].focus();
  };
  choose(Math.min(view.chosen, Math.max(0, shown.length - 1)));
}

function showDetail(prompt, of) {
  if (!prompt) return byId("detail").replaceChildren(make("p", { class: "soft" }, "No prompt matches."));
  const sorted = (answers) => [...answers].sort((one, other) => (other.reward ?? 0) - (one.reward ?? 0));
  byId("detail").replaceChildren(make("h3", {}, prompt.asked || "(empty prompt)"),
    ...prompt.images.map((image, index) => make("img", { src: `data:image/jpeg;base64,${image}`, alt: `Image ${index + 1} of the prompt` })),
    make("details", {}, make("summary", {}, `${prompt.answer == null ? "" : `answer ${prompt.answer} · `}${prompt.source} · the prompt as the model saw it`), make("pre", {}, prompt.prompt)),
    make("div", { class: of ? "columns" : "columns wide" }, of
      ? prompt.evals.map((answers, index) => make("div", {}, make("h4", {}, `step ${of.steps[index]} `, marks(answers)), answers.map(completion)))
      : sorted(prompt.answers).map(completion)));
  byId("detail").scrollTop = 0;
}

// The rest of the page -----------------------------------------------------------------------------------------------

const table = (caption, head, rows) => make("table", {}, make("caption", {}, caption), make("thead", {}, make("tr", {}, head.map((cell) => make("th", { scope: "col", class: ["step", "result", "left"].includes(cell) && "number" }, cell)))), make("tbody", {}, rows));
const progressOf = (run) => (run.step == null ? "–" : `${run.step.toLocaleString("en")} of ${run.total_steps?.toLocaleString("en") ?? "–"}`);
const gainOf = (run) => { const own = loaded.get(run.name)?.headline; return own ? `${own.measure} ${own.begin === own.end ? "" : `${two(own.from)} → `}${two(own.to)}${own.low == null ? "" : ` [${two(own.low)}, ${two(own.high)}]`}` : run.reward == null ? "–" : `reward ${two(run.reward)}`; };

function showRuns() {
  byId("runs").hidden = !page.live && list.length < 2;
  if (byId("runs").hidden) return;
  const held = document.activeElement?.dataset?.of;
  const rows = list.map((run) => {
    const box = make("input", { type: "checkbox", "aria-label": `Draw ${run.name} over others`, "data-of": `box ${run.name}` });
    box.checked = view.compared.has(run.name);
    box.onchange = () => { view.compared[box.checked ? "add" : "delete"](run.name); renew(); };
    const name = make("button", { class: "plain", "data-of": `name ${run.name}`, act: () => { Object.assign(view, { focus: run.name, pinned: null, chosen: 0, of: "" }); view.compared.clear(); renew(); } }, run.name);
    return make("tr", { "aria-current": run.name === view.focus }, make("td", {}, box), make("td", {}, name), make("td", {}, make("span", { class: `kind ${moodOf(run.state)}` }, `${shapeOf(run.state)} ${run.state}`)),
      make("td", { class: "number" }, progressOf(run)), make("td", { class: "number" }, gainOf(run)), make("td", { class: "number" }, run.eta_s == null ? "–" : FORMATS.seconds(run.eta_s)), make("td", {}, make("div", { class: "clamp" }, run.problem ?? run.slow_node ?? run.on_step ?? "")));
  });
  byId("runs-table").replaceChildren(list.length ? table(`${counted(list.length, "run")}`, ["over", "run", "state", "step", "result", "left", "last problem"], rows) : make("p", { class: "soft" }, "No runs are in this folder yet."));
  if (held) byId("runs-table").querySelector(`[data-of="${CSS.escape(held)}"]`)?.focus();
}

function showDiff() {
  const runs = compared(), keys = new Set(runs.flatMap((run) => Object.keys(run.config)));
  const differing = [...keys].filter((key) => !["run.name", "run.root"].includes(key) && new Set(runs.map((run) => run.config[key])).size > 1).sort();
  byId("diff").hidden = !isComparing();
  byId("diff-table").replaceChildren(table(differing.length ? counted(differing.length, "key") : "No key differs.", ["key", ...runs.map((run) => run.name)],
    differing.map((key) => make("tr", {}, make("th", { scope: "row" }, key), runs.map((run) => make("td", { class: "differs" }, run.config[key] ?? "default"))))));
}

function showHead() {
  const run = focus(), own = run.headline, isOver = GOOD.includes(run.state) || BAD.includes(run.state) || run.state === "stopped";
  document.title = `${shapeOf(run.state)} ${run.name} – hpc-grpo`;
  Object.assign(byId("name"), { textContent: run.name, title: run.name });
  byId("state").textContent = `${shapeOf(run.state)} ${run.state}`;
  byId("state").className = `state ${moodOf(run.state)}`;
  const length = run.total_steps && run.step != null && run.state !== "complete" ? `in ${progressOf(run)} steps` : `in ${counted(run.step ?? own?.end ?? 0, "step")}`;
  byId("measure").textContent = own ? `${isComparing() ? `${run.name}: ` : ""}${own.measure}${own.measure === "pass@1" ? " on held-out prompts" : ""}, ${length} and ${FORMATS.seconds(run.seconds)}` : "";
  byId("headline").replaceChildren(...(own ? [...(own.begin === own.end ? [] : [`${two(own.from)} `, make("i", {}, "→"), " "]), `${two(own.to)} `, own.low == null ? "" : make("small", {}, `[${two(own.low)}, ${two(own.high)}]`)] : [make("small", {}, "No step has ended yet.")]));
  byId("progress").hidden = isOver || !run.total_steps;
  byId("progress").firstChild.style.width = `${(100 * (run.step ?? 0)) / (run.total_steps || 1)}%`;
  byId("said").textContent = [!page.live && !isOver && `As of ${clock(page.written)}.`, run.on_step, run.in_step && `Now ${run.in_step}.`, run.eta_s ? `About ${FORMATS.seconds(run.eta_s)} of training are left.` : "", own?.low == null ? "" : "In brackets: the 95% interval."].filter(Boolean).join(" ");
  const sets = run.held_out.filter((each) => each.steps.length > 1).slice(0, 1);
  byId("chips").replaceChildren(...sets.flatMap((each) => Object.entries(HELD_OUT).slice(1).map(([name, test]) => make("button", { class: "button", act: () => {
    Object.assign(view, { of: `eval ${each.set}`, filter: name, chosen: 0 }); showPrompts(); byId("rollouts-title").scrollIntoView(); } }, `${counted(each.prompts.filter(test).length, "prompt")} ${name}`))));
  const link = /^https:\/\//.test(run.wandb) ? [["W&B", make("a", { href: run.wandb, rel: "noreferrer" }, run.wandb)]] : [];
  byId("facts").replaceChildren(...[...run.facts, ...link].flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
  byId("notes").replaceChildren(...[run.problem && `Last problem: ${run.problem}`, ...run.alerts].filter(Boolean).map((text) => make("li", {}, text)));
  byId("tiles").replaceChildren();
  tile(run, "pass@1, held out", PASS, "learned", "plain", 1);
  tile(run, "reward, training", "reward/mean", "learned", "plain", 1);
  if (own?.measure === "loss") tile(run, "loss", "loss/policy", "learned", "plain", -1);
  tile(run, "tokens a completion", "tokens/completion_mean", "tokens", "plain", 0);
  tile(run, "cut off at the limit", "tokens/truncated_fraction", "cut", "percent", -1);
  tile(run, "entropy", "policy/entropy", "entropy", "plain", 0);
  tile(run, "tokens per second", "throughput/tokens_per_s", "speed", "plain", 1);
}

function showEvals() {
  const { evals } = focus(), at = [...new Set(evals.flatMap((own) => own.points.map(([step]) => step)))].sort((one, other) => one - other);
  const chosen = at.length > 6 ? [...new Set([0, 1, 2, 3, 4, 5].map((index) => at[Math.floor((index * (at.length - 1)) / 5)]))] : at;
  byId("evals").hidden = !evals.length;
  const cell = (point) => (point ? `${FORMATS.plain(point[1])}${point[2] == null ? "" : ` ${whole(`[${FORMATS.plain(point[2])}, ${FORMATS.plain(point[3])}]`)}`}` : "–");
  byId("evals-table").replaceChildren(table(at.length > chosen.length ? `${chosen.length} of ${at.length} evals` : "", ["metric", ...chosen.map((step) => `step ${step}`)],
    evals.map((own) => make("tr", {}, make("th", { scope: "row" }, own.name), chosen.map((step) => make("td", {}, cell(own.points.find(([other]) => other === step))))))));
}

const clock = (unix) => new Date(1000 * unix).toLocaleString("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
function showAttempts() {
  const { attempts, seconds, metrics } = focus();
  byId("time-note").textContent = attempts.length ? `${isComparing() ? `${focus().name}: ` : ""}${FORMATS.seconds(seconds)} in ${counted(attempts.length, "attempt")}` : "no attempt yet";
  const begin = Math.min(...attempts.map((own) => own.started_at - own.queued_s)), end = Math.max(...attempts.map((own) => own.started_at + (own.seconds ?? 0))), all = end - begin || 1;
  const isSpread = attempts.length > 1 || attempts.some((own) => own.queued_s > 1);
  const place = (from, length) => ({ left: `${(100 * (from - begin)) / all}%`, width: `${(100 * length) / all}%` });
  const entry = (own) => make("div", { class: "attempt" },
    make("p", {}, make("strong", {}, `Attempt ${own.attempt} `), make("span", { class: `kind ${moodOf(own.kind)}` }, `${shapeOf(own.kind)} ${own.kind}`),
      soft(` · job ${own.job_id} on ${own.nodes.slice(0, 4).join(", ")}${own.nodes.length > 4 ? ` and ${own.nodes.length - 4} more` : ""} · ${clock(own.started_at)}${own.seconds == null ? "" : `, for ${FORMATS.seconds(own.seconds)}`}${own.queued_s > 1 ? `, queued ${FORMATS.seconds(own.queued_s)}` : ""}${own.num_steps == null ? "" : ` · ${counted(own.num_steps, "step")} from step ${own.first_step}`}`)),
    own.why && make("p", {}, own.why), [...Object.entries(own.lost_nodes).map(([node, why]) => `lost ${node}: ${why}`), ...own.restarts.map((why) => `restarted: ${why}`), ...own.late.map((why) => `stood still: ${why}`)].map((text) => make("p", {}, text)),
    own.advice && moodOf(own.kind) === "bad" && make("p", {}, make("strong", {}, own.advice[0]), `: ${own.advice[1]}`),
    own.error && make("details", {}, make("summary", {}, "its log says"), make("pre", {}, own.error)),
    isSpread && make("div", { class: "span", "aria-hidden": "true" }, own.queued_s > 1 && make("span", { class: "queued", style: place(own.started_at - own.queued_s, own.queued_s) }), make("span", { style: { ...place(own.started_at, own.seconds ?? 0), ...keyOf(moodOf(own.kind) === "bad" ? "wrong" : "a") } })),
    make("div", { class: "bar", "aria-hidden": "true" }, own.parts.map(([name, length]) => make("span", { style: { ...keyOf(PHASE_COLORS[name] ?? "f"), flex: String(length) } }))),
    make("ul", { class: "legend" }, own.parts.map(([name, length]) => make("li", { style: keyOf(PHASE_COLORS[name] ?? "f") }, `${name} `, make("b", {}, FORMATS.seconds(length)), soft(` ${Math.round((100 * length) / (own.seconds || 1))} %`)))));
  const older = attempts.slice(0, -12), means = new Map();
  for (const [name, [row]] of Object.entries(metrics)) {
    const [, node] = name.match(/^node\/(?:train|sample)_s\/(.+)$/) ?? [], own = row.filter((value) => value != null);
    if (node && own.length) means.set(node, (means.get(node) ?? 0) + own.reduce((sum, value) => sum + value, 0) / own.length);
  }
  const nodes = [...means].sort((one, other) => other[1] - one[1]).slice(0, 16);
  const open = [...byId("attempts").querySelectorAll("details")].map((own) => own.open);
  byId("attempts").replaceChildren(...[
    isSpread && make("div", { class: "ticks", "aria-hidden": "true" }, [0, 0.25, 0.5, 0.75, 1].map((part) => make("span", {}, FORMATS.seconds(part * all)))),
    older.length > 0 && make("details", {}, make("summary", {}, `${counted(older.length, "earlier attempt")}`), older.map(entry)), ...attempts.slice(-12).map(entry), !attempts.length && make("p", { class: "soft" }, "No attempt has begun."),
    nodes.length > 1 && make("div", { class: "nodes" }, nodes.flatMap(([node, mean]) => [make("span", {}, node), make("div", { class: "span", "aria-hidden": "true" }, make("span", { style: { left: "0", width: `${(100 * mean) / nodes[0][1]}%`, ...keyOf("a") } })), make("b", {}, `${FORMATS.seconds(mean)} a step`)])),
  ].filter(Boolean));
  byId("attempts").querySelectorAll("details").forEach((own, index) => { own.open = open[index] ?? false; });
}

/** Draw everything that the shown runs say: the same charts get new data, others are drawn anew. */
function refresh() {
  showRuns();
  const run = focus();
  for (const id of ["curves", "time", "evals", "rollouts"]) byId(id).hidden = !run;
  if (!run) return;
  if (!view.of) view.of = run.held_out.length ? `eval ${run.held_out[0].set}` : "training";
  const runs = isComparing() ? compared() : [run];
  steps = runs.length > 1 ? [...new Set(runs.flatMap((own) => own.steps))].sort((one, other) => one - other) : run.steps;
  for (const show of [showHead, showDiff, showEvals, showAttempts]) show();
  const { names } = chartsOf(run), charts = steps.length ? (runs.length > 1 ? chartsOver(runs) : chartsOf(run).charts) : [];
  const now = JSON.stringify([runs.map((own) => own.name), charts.map((chart) => [chart.id, chart.lines.map((line) => [line.name, line.label])]), steps.length < 40, steps.length < 200]);
  byId("curves").hidden = byId("hero").hidden = !charts.length;
  if (now === signature) {
    const [first] = drawn, wasWhole = byId("whole").hidden, { min, max } = first?.chart.scales.x ?? {};
    for (const own of drawn) own.renew();
    if (steps.length) zoom(wasWhole ? steps[0] : min, wasWhole ? steps.at(-1) : max);
  } else {
    for (const own of drawn) own.end();
    drawn = [];
    for (const id of ["hero", "charts"]) byId(id).replaceChildren();
    charts.forEach(draw);
    signature = now;
    byId("more").replaceChildren(make("option", { value: "" }, "another metric …"), ...names.map((name) => make("option", {}, name)));
  }
  Object.assign(byId("step"), { min: 0, max: Math.max(0, steps.length - 1), disabled: steps.length < 2, value: pinnedIndex() });
  byId("step-now").textContent = steps[pinnedIndex()] ?? "–";
  for (const { write } of drawn) write(pinnedIndex());
  const told = JSON.stringify([run.name, view.of, view.of.startsWith("eval") ? run.held_out.map((each) => each.steps) : [run.attempts.length, steps[pinnedIndex()]]]);
  if (byId("prompts").dataset.of !== told) showPrompts();
  byId("prompts").dataset.of = told;
}

const renew = () => (page.live ? poll() : refresh());
function showTheme(theme) {
  document.documentElement.dataset.theme = theme;
  for (const { chart } of drawn) chart.redraw(); // the bars' paths contain their colors
}

// The dashboard ------------------------------------------------------------------------------------------------------

const POLL_MS = 2000;
const token = new URLSearchParams(location.hash.slice(1)).get("token") ?? "";
async function ask(path) {
  const answer = await fetch(`api/${path}`, { headers: { Authorization: `Bearer ${token}` }, cache: "no-store" });
  if (!answer.ok) throw new Error(answer.status === 403 ? "The token in the address is not that of this dashboard: open the address that it has printed." : `The dashboard answers ${answer.status}.`);
  return answer.json();
}
let timer = 0, shown = "", versions = new Map();
/** Ask what is new, and again in two seconds while somebody looks. */
async function poll() {
  clearTimeout(timer);
  if (document.hidden) return;
  try {
    list = await ask("runs");
    view.focus = list.some((run) => run.name === view.focus) ? view.focus : [...list].sort((one, other) => BUSY.includes(other.state) - BUSY.includes(one.state) || other.created_at - one.created_at)[0]?.name;
    showRuns();
    for (const { name, version } of list.filter((run) => run.name === view.focus || view.compared.has(run.name))) {
      if (versions.get(name) === version) continue;
      if (!loaded.has(name)) byId("link").textContent = `Reading ${name} …`;
      const known = loaded.get(name), run = await ask(`run?run=${encodeURIComponent(name)}&evals=${known?.eval_version ?? ""}`);
      loaded.set(name, { ...run, held_out: run.held_out ?? known.held_out });
      versions.set(name, version);
    }
    byId("link").textContent = "";
    const now = JSON.stringify([view.focus, ...view.compared].map((name) => [name, versions.get(name)]));
    if (now !== shown) refresh();
    shown = now;
  } catch (error) {
    byId("link").textContent = error instanceof TypeError ? "The dashboard does not answer. It is asked again every 2 seconds." : error.message;
  }
  timer = setTimeout(poll, POLL_MS);
}

const search = make("input", { type: "search", placeholder: "search", "aria-label": "Search prompts and completions" });
search.oninput = () => { view.text = search.value.toLowerCase(); view.chosen = 0; showPrompts(); };
byId("tools").append(search);
byId("step").oninput = () => pin(steps[+byId("step").value]);
byId("smoothing").oninput = ({ target }) => {
  view.smoothing = +target.value;
  byId("smoothing-now").textContent = view.smoothing ? view.smoothing.toFixed(2) : "off";
  for (const { renew } of drawn) renew();
};
byId("more").onchange = ({ target }) => { if (target.value) { view.extra.add(target.value); refresh(); byId(`chart-extra-${target.value}`)?.scrollIntoView(); target.value = ""; } };
byId("whole").onclick = () => zoom(steps[0], steps.at(-1));
byId("closer").onclick = () => {
  const { min, max } = drawn[0]?.chart.scales.x ?? {}, middle = steps[pinnedIndex()], quarter = (max - min) / 4;
  if (quarter > 0.5) zoom(Math.max(steps[0], middle - quarter), Math.min(steps.at(-1), middle + quarter));
};
byId("theme").onclick = () => showTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
const dark = matchMedia("(prefers-color-scheme: dark)");
(dark.onchange = () => showTheme(dark.matches ? "dark" : "light"))();
refresh();
if (page.live) {
  document.addEventListener("visibilitychange", poll);
  poll();
}
