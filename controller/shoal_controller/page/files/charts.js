// Loss, step time, samples and goodput over the same time: four charts of uPlot that zoom and point together, with a
// line at every change of the world. Called by the job's view. What is drawn is also said: each chart has a sentence.

import { clock, duration, figure, percent, utc } from "./amounts.js";
import { element, setText } from "./elements.js";
import { reasonTone, reasonWord } from "./phases.js";
import { ink, onTheme } from "./theme.js";
import { GUTTER, MARGIN } from "./time_axis.js";

const KINDS = [
  { name: "loss", title: "Loss", shown: (value) => figure(value) },
  { name: "step_seconds", title: "Step time", shown: duration, fromZero: true },
  { name: "samples_per_second", title: "Samples", shown: (value) => `${figure(value, 3)}/s`, fromZero: true },
  { name: "goodput_ratio", title: "Goodput", shown: percent, fromZero: true, most: 1 },
];
const HEIGHT = 128;
const FONT = '11px system-ui, "Segoe UI", Roboto, sans-serif';

let library = null;

/** uPlot, loaded when the first chart is drawn: the page's first paint does not wait for it. */
function loadLibrary() {
  library ??= new Promise((resolve, reject) => {
    const script = element("script", { src: "/page/uplot/uPlot.iife.min.js" });
    script.onload = () => resolve(window.uPlot);
    script.onerror = () => reject(new Error("the chart library could not be loaded"));
    document.head.append(script, element("link", { rel: "stylesheet", href: "/page/uplot/uPlot.min.css" }));
  });
  return library;
}

export class Charts {
  constructor(place, axis, signal) {
    this.axis = axis;
    this.worlds = [];
    this.charts = [];
    this.columns = null;
    this.panels = KINDS.map((kind) => panelOf(kind));
    place.replaceChildren(...this.panels.map((panel) => panel.box));
    this.start(signal);
  }

  async start(signal) {
    const uPlot = await loadLibrary();
    if (signal.aborted) return;
    this.make(uPlot);
    onTheme(() => this.make(uPlot), signal);
    const sizes = new ResizeObserver(() => this.fit());
    sizes.observe(this.panels[0].plot);
    const zoomed = () => this.draw();
    this.axis.listeners.add(zoomed);
    signal.addEventListener("abort", () => {
      sizes.disconnect();
      this.axis.listeners.delete(zoomed);
      for (const chart of this.charts) chart.destroy();
    });
  }

  make(uPlot) {
    for (const chart of this.charts) chart.destroy();
    this.charts = KINDS.map((kind, index) => this.chart(uPlot, kind, this.panels[index]));
    this.draw();
  }

  chart(uPlot, kind, panel) {
    const axes = { stroke: ink("muted"), font: FONT, grid: { stroke: ink("line"), width: 1 }, ticks: { show: false } };
    const options = {
      width: Math.max(120, panel.plot.clientWidth),
      height: HEIGHT,
      padding: [10, MARGIN, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: "job" }, drag: { x: true, y: false, setScale: false }, points: { size: 6 } },
      scales: { x: { time: true, range: () => this.axis.bounds }, y: { range: (_, least, most) => rangeOf(kind, least, most) } },
      axes: [
        { ...axes, size: 24, space: 70, values: (_, times, __, ___, apart) => times.map((time) => hourOf(time, apart)) },
        { ...axes, size: GUTTER, values: (_, values) => values.map((value) => (value === null ? "" : kind.shown(value))) },
      ],
      series: [{}, { stroke: ink("accent"), width: 1.5, points: { show: false }, spanGaps: false }],
      hooks: {
        draw: [(plot) => this.marks(plot)],
        setSelect: [(plot) => this.zoomTo(plot)],
        setCursor: [(plot) => this.pointed(plot)],
      },
    };
    const plot = new uPlot(options, [[], []], panel.plot);
    plot.over.addEventListener("dblclick", () => this.axis.follow(this.axis.span));
    return plot;
  }

  zoomTo(plot) {
    if (plot.select.width < 4) return;
    const from = plot.posToVal(plot.select.left, "x");
    const to = plot.posToVal(plot.select.left + plot.select.width, "x");
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.axis.zoom(from, to);
  }

  pointed(plot) {
    const at = plot.cursor.idx;
    const time = plot.cursor.left >= 0 && at !== null ? plot.data[0][at] : null;
    if (plot === this.charts[0]) this.axis.point(plot.cursor.left >= 0 ? plot.posToVal(plot.cursor.left, "x") : null);
    plot.over.title = time === undefined || time === null ? "" : utc(time);
    const index = this.charts.indexOf(plot);
    const value = time === undefined || time === null ? null : plot.data[1][at];
    this.readout(index, time ?? null, value);
  }

  /** What the chart says in a word: at the cursor, else now. */
  readout(index, time, value) {
    const { shown } = KINDS[index];
    const last = this.columns?.[KINDS[index].name].findLast((one) => one !== null);
    const text = time !== null && value !== null && value !== undefined ? `${shown(value)} at ${clock(time)}` : shown(last ?? null);
    setText(this.panels[index].value, text);
  }

  show(columns, worlds) {
    this.columns = columns;
    this.worlds = worlds;
    this.draw();
  }

  draw() {
    if (!this.columns) return;
    const [from, to] = this.axis.bounds;
    KINDS.forEach((kind, index) => {
      const values = this.columns[kind.name];
      setText(this.panels[index].sentence, sentence(kind, this.columns.times, values, from, to));
      this.charts[index]?.setData([this.columns.times, values]);
      if (!(this.charts[index]?.cursor.left >= 0)) this.readout(index, null, null);
    });
  }

  fit() {
    for (const [index, chart] of this.charts.entries()) {
      const width = this.panels[index].plot.clientWidth;
      if (width > 0 && width !== chart.width) chart.setSize({ width, height: HEIGHT });
    }
  }

  marks(plot) {
    const { ctx } = plot;
    const { top, height } = plot.bbox;
    ctx.save();
    const [from, to] = this.axis.bounds;
    for (const world of this.worlds) {
      if (world.began < from || world.began > to) continue;
      const x = Math.round(plot.valToPos(world.began, "x", true)) + 0.5;
      ctx.strokeStyle = ink(`tone-${reasonTone(world.reason)}`);
      ctx.setLineDash(world.reason === "balance" ? [2, 4] : []);
      ctx.globalAlpha = world.reason === "balance" ? 0.5 : 0.8;
      ctx.beginPath();
      ctx.moveTo(x, top);
      ctx.lineTo(x, top + height);
      ctx.stroke();
    }
    ctx.restore();
  }
}

function panelOf(kind) {
  const value = element("span", { class: "value" });
  const plot = element("div", { class: "plot", "aria-hidden": "true" });
  const text = element("p", { class: "unseen" });
  const box = element("section", { class: "chart", "aria-label": kind.title }, element("h3", {}, kind.title, " ", value), plot, text);
  return { box, value, plot, sentence: text };
}

const MINUTES = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const SECONDS = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });

const hourOf = (time, apart) => (apart < 60 ? SECONDS : MINUTES).format(new Date(time * 1000));

function rangeOf(kind, least, most) {
  if (least === null || most === null) return [0, kind.most ?? 1];
  if (kind.most) return [0, kind.most * 1.03];
  const low = kind.fromZero ? 0 : least;
  const room = (most - low) * 0.08 || Math.abs(most) * 0.1 || 1;
  return [kind.fromZero ? 0 : low - room, most + room];
}

/** The same for those who do not see it. */
function sentence(kind, times, values, from, to) {
  const shown = values.filter((value, index) => value !== null && times[index] >= from && times[index] <= to);
  if (!shown.length) return `${kind.title}: nothing is known of this time.`;
  const least = shown.reduce((one, other) => Math.min(one, other));
  const most = shown.reduce((one, other) => Math.max(one, other));
  return `${kind.title} from ${clock(from)} to ${clock(to)}: first ${kind.shown(shown[0])}, last ${kind.shown(shown.at(-1))}, between ${kind.shown(least)} and ${kind.shown(most)}.`;
}

/** For whoever wants the reason in words. */
export const markSentence = (world) => `${reasonWord(world.reason)} at ${clock(world.began)}: ${world.sentence}`;
