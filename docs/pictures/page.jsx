// Draws one dashboard with Grafana's own panels, from `window.BOARD`: its panels as the chart has them, each with the
// series that Prometheus has answered. `draw.py` puts both into a page and takes a picture of it. Nothing is asked here.

import React from "react";
import { createRoot } from "react-dom/client";
import { applyFieldOverrides, createTheme, EventBusSrv, FieldType, toDataFrame } from "@grafana/data";
import "uplot/dist/uPlot.min.css";
import { BarGauge, BigValue, PanelChrome, PanelContextProvider, ThemeContext, TimeSeries } from "@grafana/ui";

const COLUMN = 60, ROW = 32, GAP = 8, HEADER = 32, PADDING = 8;
const theme = createTheme({ colors: { mode: "light" } });
const { title, panels, marks, from, to } = window.BOARD;
const thresholds = { mode: "absolute", steps: [{ value: -Infinity, color: "green" }] };
const timeRange = { from: from * 1000, to: to * 1000 };

const numberOf = (text) => (Number.isNaN(Number(text)) ? null : Number(text));

/** The series of a panel as Grafana's frames, with its unit and style. */
function framesOf(panel) {
  const { unit, custom = {} } = panel.fieldConfig?.defaults ?? {};
  const style = { drawStyle: "line", lineInterpolation: "linear", showPoints: "never", lineWidth: 1, ...custom };
  const config = { unit, color: { mode: "palette-classic" }, custom: style, thresholds };
  const data = panel.series.map(({ legend, row, points }) =>
    toDataFrame({
      name: legend,
      meta: { custom: { row } },
      fields: [
        { name: "Time", type: FieldType.time, values: points.map(([time]) => time * 1000) },
        {
          name: legend, type: FieldType.number, values: points.map(([, value]) => numberOf(value)),
          config: { ...config, displayName: legend },
        },
      ],
    })
  );
  const frames = applyFieldOverrides({
    data,
    theme,
    timeZone: "utc",
    replaceVariables: (text) => text,
    fieldConfig: { defaults: {}, overrides: [] }, // without a registry of fields' settings, defaults are not heeded
  });
  frames.forEach(({ fields: [, field] }, seriesIndex) => (field.state = { ...field.state, seriesIndex }));
  return frames;
}

function lastOf(frame) {
  const field = frame.fields[1];
  return { field, value: { ...field.display(field.values[field.values.length - 1]), title: field.config.displayName } };
}

function Numbers({ frames, width, height, textMode }) {
  const each = Math.floor(width / Math.max(frames.length, 1));
  return (
    <div style={{ display: "flex" }}>
      {frames.map(lastOf).map(({ value }, index) => (
        <BigValue key={index} theme={theme} width={each} height={height} colorMode="value" graphMode="none"
          textMode={textMode} value={{ ...value, color: theme.visualization.getColorByName("green") }} />
      ))}
    </div>
  );
}

function Bars({ frames, width, height }) {
  const each = Math.max(18, Math.floor(height / Math.max(frames.length, 1)) - 4);
  const all = frames.map(lastOf);
  const max = Math.max(...all.map(({ value }) => value.numeric), 1e-9);
  return all.map(({ field, value }, index) => (
    <div key={index} style={{ marginBottom: 4 }}>
      <BarGauge theme={theme} width={width} height={each} orientation="horizontal" displayMode="basic"
        itemSpacing={4} lcdCellWidth={8} value={value} text={{ titleSize: 12, valueSize: 14 }}
        field={{ ...field.config, min: 0, max }} />
    </div>
  ));
}

const withMarks = new WeakSet();
const MARK_ROWS = 4, MARK_SIZE = 10;

/** Has a graph draw the dashboard's annotations, as Grafana does: a dashed line each, here with its title beside it. */
function drawMarks(config) {
  if (withMarks.has(config)) {
    return null;
  }
  withMarks.add(config);
  config.addHook("draw", (plot) => {
    const { ctx, bbox } = plot, scale = window.devicePixelRatio;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = theme.visualization.getColorByName("dark-orange");
    ctx.font = `${MARK_SIZE * scale}px ${theme.typography.fontFamily}`;
    ctx.textAlign = "left";
    ctx.setLineDash([4 * scale, 4 * scale]);
    marks.forEach(({ time, title: reason }, index) => {
      const x = plot.valToPos(time * 1000, "x", true);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      ctx.fillText(reason, x + 2 * scale, bbox.top + MARK_SIZE * scale * (1 + (index % MARK_ROWS)));
    });
    ctx.restore();
  });
  return null;
}

const shown = ({ prefix = "", text, suffix = "" }) => prefix + text + suffix;

function Rows({ frames }) {
  const columns = [...new Set(frames.map((frame) => frame.name))];
  const rows = [...new Set(frames.map((frame) => frame.meta.custom.row))].sort();
  return (
    <table style={{ width: "100%", fontSize: 12 }}>
      <tbody>
        <tr style={{ color: theme.colors.text.secondary, textAlign: "left" }}>
          <th>worker</th>
          {columns.map((column) => <th key={column}>{column}</th>)}
        </tr>
        {rows.map((row) => (
          <tr key={row}>
            <td>{row}</td>
            {columns.map((column) => {
              const frame = frames.find((one) => one.name === column && one.meta.custom.row === row);
              return <td key={column}>{frame ? shown(lastOf(frame).value) : ""}</td>;
            })}
          </tr>
        ))}
      </tbody>
    </table>
  );
}

function Content({ panel, width, height }) {
  const frames = framesOf(panel);
  if (!frames.length) {
    return <div style={{ color: theme.colors.text.secondary, paddingTop: height / 3, textAlign: "center" }}>No data</div>;
  }
  if (panel.type === "stat") {
    return <Numbers frames={frames} width={width} height={height} textMode={panel.options?.textMode ?? "auto"} />;
  }
  if (panel.type === "bargauge") {
    return <Bars frames={frames} width={width} height={height} />;
  }
  if (panel.type === "table") {
    return <Rows frames={frames} />;
  }
  return (
    <TimeSeries frames={frames} width={width} height={height} timeRange={timeRange} timeZone="utc" structureRev={1}
      legend={{ showLegend: true, displayMode: "list", placement: "bottom", calcs: [] }} options={{}}>
      {drawMarks}
    </TimeSeries>
  );
}

function Panel({ panel }) {
  const { x, y, w, h } = panel.gridPos;
  const width = w * COLUMN - GAP, height = h * ROW - GAP;
  const place = { position: "absolute", left: x * COLUMN + GAP, top: y * ROW + HEADER + GAP };
  if (panel.type === "row") {
    return <div style={{ ...place, fontWeight: 500, fontSize: 15, paddingTop: 6 }}>{panel.title}</div>;
  }
  return (
    <div style={place}>
      <PanelChrome title={panel.title} width={width} height={height} padding="md">
        {(innerWidth, innerHeight) => <Content panel={panel} width={innerWidth} height={innerHeight} />}
      </PanelChrome>
    </div>
  );
}

const context = { eventsScope: "global", eventBus: new EventBusSrv() };

createRoot(document.getElementById("board")).render(
  <ThemeContext.Provider value={theme}>
    <PanelContextProvider value={context}>
      <div style={{ position: "relative", fontFamily: theme.typography.fontFamily, color: theme.colors.text.primary }}>
        <div style={{ fontSize: 18, padding: PADDING }}>{title}</div>
        {panels.map((panel, index) => <Panel key={index} panel={panel} />)}
      </div>
    </PanelContextProvider>
  </ThemeContext.Provider>
);
