/* The explorer's pictures: SVG as text, from a state and nothing else. Colors are in explorer.css. */
(function (root) {
  "use strict";

  const { band, ball } = root.BandMath;
  const P_MIN = 1e-5;
  const BOX = { width: 380, height: 290, left: 52, right: 10, top: 14, bottom: 40 };

  const round = (v) => Math.round(v * 100) / 100;
  const clamp = (v, low, high) => Math.min(Math.max(v, low), high);
  const spec = (state) => (state.divergence === "alpha" ? `alpha:${state.alpha}` : state.divergence);

  /** Bounds of both rules at one p, in ratio space; `capped` says whether the cap binds. */
  function bounds(state, p = state.p) {
    const b = band(p, spec(state), state.radius);
    const top = state.cap === null ? b.upper : Math.min(b.upper, state.cap);
    return { ...b, top, capped: top < b.upper, clipLow: 1 - state.low, clipHigh: 1 + state.high };
  }

  // ---- scales ----

  function xScale(axis) {
    const span = BOX.width - BOX.left - BOX.right;
    if (axis === "linear") {
      return { at: (p) => BOX.left + span * p, from: (x) => (x - BOX.left) / span };
    }
    const depth = -Math.log10(P_MIN);
    return {
      at: (p) => BOX.left + span * (1 + Math.log10(Math.max(p, 1e-12)) / depth),
      from: (x) => 10 ** (((x - BOX.left) / span - 1) * depth),
    };
  }

  function yScale(low, high, log) {
    const span = BOX.height - BOX.top - BOX.bottom;
    const of = log ? (v) => Math.log10(Math.max(v, 1e-300)) : (v) => v;
    return (v) => BOX.top + (span * (of(high) - of(v))) / (of(high) - of(low));
  }

  function samples(axis) {
    const ps = [];
    if (axis === "log") for (let i = 0; i < 200; i += 1) ps.push(P_MIN ** (1 - i / 260));
    for (let i = 1; i < 160; i += 1) ps.push(i / 160);
    for (let i = 3; i < 8; i += 1) ps.push(10 ** -i, 1 - 10 ** -i);
    return ps.filter((p) => axis === "linear" || p >= P_MIN).sort((a, b) => a - b);
  }

  // ---- pieces of SVG ----

  const escape = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;");
  const tag = (name, attributes, inside = "") =>
    `<${name} ${Object.entries(attributes).map(([k, v]) => `${k}="${v}"`).join(" ")}>${inside}</${name}>`;
  const points = (list) => list.map(([x, y]) => `${round(x)},${round(clamp(y, -2000, 2000))}`).join(" ");
  const polyline = (list, kind) => tag("polyline", { points: points(list), class: kind });
  const polygon = (list, kind, extra = {}) => tag("polygon", { points: points(list), class: kind, ...extra });
  const line = (x1, y1, x2, y2, kind) =>
    tag("line", { x1: round(x1), y1: round(y1), x2: round(x2), y2: round(y2), class: kind });
  const text = (x, y, content, anchor = "middle", kind = "be-text") =>
    tag("text", { x: round(x), y: round(y), "text-anchor": anchor, class: kind }, escape(content));
  const dot = (x, y, kind, radius = 4.5) => tag("circle", { cx: round(x), cy: round(y), r: radius, class: kind });
  const hatch = (id) =>
    `<defs><pattern id="${id}" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">` +
    `<rect width="7" height="7" class="be-outside"/><line x1="0" y1="0" x2="0" y2="7" class="be-hatch"/></pattern>` +
    `<clipPath id="${id}-clip"><rect x="${BOX.left}" y="${BOX.top}" width="${BOX.width - BOX.left - BOX.right}" ` +
    `height="${BOX.height - BOX.top - BOX.bottom}"/></clipPath></defs>`;

  const RAISED = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };
  const raised = (n) => String(n).replace(/./g, (c) => RAISED[c]);

  /** Five significant digits; powers of ten where zeros would pile up. */
  function number(v) {
    if (v === 0) return "0";
    if (!Number.isFinite(v)) return v > 0 ? "∞" : "−∞";
    const size = Math.abs(v);
    if (size >= 1e-3 && size < 1e5) return String(Number(v.toPrecision(5))).replace("-", "−");
    const [digits, power] = v.toExponential(3).split("e");
    return `${digits.replace("-", "−")} × 10${raised(Number(power))}`;
  }

  function axes(x, y, axis, ticks, label, yLabel) {
    const bottom = BOX.height - BOX.bottom;
    const steps = axis === "log" ? [1e-5, 1e-4, 1e-3, 0.01, 0.1, 1] : [0, 0.2, 0.4, 0.6, 0.8, 1];
    const name = (p) => (axis === "log" && p < 0.01 ? `10${raised(Math.round(Math.log10(p)))}` : p);
    return (
      steps.map((p) => line(x.at(p), BOX.top, x.at(p), bottom, "be-grid") + text(x.at(p), bottom + 16, name(p))).join("") +
      ticks.map(([v, t]) => line(BOX.left, y(v), BOX.width - BOX.right, y(v), "be-grid") + text(BOX.left - 6, y(v) + 4, t, "end")).join("") +
      text((BOX.left + BOX.width - BOX.right) / 2, BOX.height - 6, label, "middle", "be-text be-label") +
      text(0, 0, yLabel, "middle", "be-text be-label").replace("<text ", `<text transform="translate(10 ${(BOX.top + bottom) / 2}) rotate(-90)" `)
    );
  }

  /** Both line charts: bands and clips as functions of p, what lies outside the simplex hatched. */
  function chart(state, id, { log, low, high, ticks, yLabel, of, outside }) {
    const x = xScale(state.axis);
    const y = yScale(low, high, log);
    const ps = samples(state.axis);
    const at = ps.map((p) => bounds(state, p));
    const curve = (pick) => ps.map((p, i) => [x.at(p), y(of(pick(at[i]), p))]);
    const lower = curve((b) => b.lower);
    const top = curve((b) => b.top);
    const now = bounds(state);
    const here = clamp(x.at(state.p), BOX.left, BOX.width - BOX.right);
    const marks = [now.lower, now.top].map((r) => y(of(r, state.p)));
    const inside =
      outside.map((edge) => polygon([...ps.map((p) => [x.at(p), y(edge.at(p))]), [x.at(1), y(edge.at(1))], [x.at(1), y(edge.to)], [x.at(ps[0]), y(edge.to)]], "be-out", { fill: `url(#${id})` })).join("") +
      polygon([...lower, ...top.slice().reverse()], "be-area") +
      line(BOX.left, y(of(1, 0)), BOX.width - BOX.right, y(of(1, 0)), "be-one") +
      polyline(curve((b) => b.clipLow), "be-clip") +
      polyline(curve((b) => b.clipHigh), "be-clip") +
      (at.some((b) => b.capped) ? polyline(curve((b) => b.upper), "be-uncapped") : "") +
      polyline(lower, "be-band") +
      polyline(top, "be-band") +
      line(here, BOX.top, here, BOX.height - BOX.bottom, "be-here");
    return (
      hatch(id) +
      axes(x, y, state.axis, ticks, state.axis === "log" ? "old probability p (log scale)" : "old probability p", yLabel) +
      tag("g", { "clip-path": `url(#${id}-clip)` }, inside) +
      marks.map((m) => dot(here, clamp(m, BOX.top, BOX.height - BOX.bottom), "be-mark")).join("")
    );
  }

  function ratioChart(state) {
    const reach = state.axis === "log" ? 3 : 1;
    const ticks = state.axis === "log"
      ? [-3, -2, -1, 0, 1, 2, 3].map((n) => [10 ** n, n < -1 || n > 1 ? `10${raised(n)}` : 10 ** n])
      : [0.1, 0.2, 0.5, 1, 2, 5, 10].map((v) => [v, v]);
    return chart(state, "be-ratio-hatch", {
      log: true, low: 10 ** -reach, high: 10 ** reach, ticks,
      yLabel: "ratio r = q / p (log scale)",
      of: (r) => r,
      outside: [{ at: (p) => 1 / p, to: 1e9 }],
    });
  }

  function moveChart(state) {
    const moves = samples(state.axis).flatMap((p) => {
      const b = bounds(state, p);
      return [p * (b.top - 1), p * (1 - b.lower)];
    });
    const most = Math.max(...moves);
    const high = [0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 1].find((v) => v >= most * 1.02) ?? 1;
    const ticks = [-1, -0.5, 0, 0.5, 1].map((v) => [v * high, String(Number((v * high).toPrecision(3))).replace("-", "−")]);
    return chart(state, "be-move-hatch", {
      log: false, low: -high, high, ticks,
      yLabel: "allowed move Δπ = q − p",
      of: (r, p) => p * (r - 1),
      outside: [{ at: (p) => 1 - p, to: 2 }, { at: (p) => -p, to: -2 }],
    });
  }

  // ---- the ternary picture ----

  const TRIANGLE = { top: 28, base: 292, left: 8, right: 312 };
  const APEX = (TRIANGLE.left + TRIANGLE.right) / 2;
  const corner = ([a, b, c]) => [
    APEX * a + TRIANGLE.left * b + TRIANGLE.right * c,
    TRIANGLE.top * a + TRIANGLE.base * (b + c),
  ];
  const old = (state) => [state.p, (1 - state.p) * state.share, (1 - state.p) * (1 - state.share)];

  function ternary(state) {
    const P = old(state);
    const b = bounds(state);
    const region = ball(P, spec(state), state.radius);
    const level = (q, kind) => {
      const edge = clamp(q, 0, 1);
      return line(...corner([edge, 1 - edge, 0]), ...corner([edge, 0, 1 - edge]), kind);
    };
    const strip = (low, high) => [[low, 1 - low, 0], [low, 0, 1 - low], [high, 0, 1 - high], [high, 1 - high, 0]].map(corner);
    const extremes = [region[0], region[region.length / 2]];
    const sides = [b.lower, b.top].map((r) => clamp(r * state.p, 0, 1));
    // the two labels beside the right edge, kept a line apart and above the corner's name
    const heights = sides.map((q) => corner([q, 0, 1 - q])[1]);
    const lowest = Math.min(heights[0], TRIANGLE.base - 2);
    const labels = [lowest, Math.min(heights[1], lowest - 14)].map((y, i) =>
      text(corner([sides[i], 0, 1 - sides[i]])[0] + 7, y + 4, `q = ${number(Number(sides[i].toPrecision(3)))}`, "start", "be-text be-level")
    );
    return (
      polygon([[1, 0, 0], [0, 1, 0], [0, 0, 1]].map(corner), "be-simplex") +
      polygon(strip(...sides), "be-area") +
      polygon(region.map(corner), "be-region") +
      level(state.p * (1 - state.low), "be-clip") +
      level(state.p * (1 + state.high), "be-clip") +
      (b.capped ? level(state.p * b.upper, "be-uncapped") : "") +
      sides.map((q) => level(q, "be-band")).join("") +
      extremes.map((Q) => dot(...corner(Q), "be-touch", 3)).join("") +
      dot(...corner(P), "be-old", 5) +
      dot(...corner(P), "be-handle", 20) +
      labels.join("") +
      text(APEX, 16, "all on the sampled token: q = 1") +
      text(TRIANGLE.left - 6, TRIANGLE.base + 18, "all on token b", "start") +
      text(TRIANGLE.right + 6, TRIANGLE.base + 18, "all on token c", "end")
    );
  }

  /** p and share of the old policy drawn at a point of the ternary picture. */
  function fromTernary(x, y) {
    const a = clamp((TRIANGLE.base - y) / (TRIANGLE.base - TRIANGLE.top), 0.001, 0.999);
    const half = ((TRIANGLE.right - TRIANGLE.left) / 2) * (1 - a);
    const share = clamp((APEX + half - x) / (2 * half), 0.02, 0.98);
    return { p: Number(a.toPrecision(3)), share: Number(share.toFixed(2)) };
  }

  function fromChart(x, axis) {
    const p = xScale(axis).from(x);
    const digits = p > 0.9 ? 3 + Math.ceil(-Math.log10(Math.max(1 - p, 1e-6))) : 3;
    return Number(clamp(p, axis === "log" ? P_MIN : 0.001, 0.9999).toPrecision(digits));
  }

  root.BandCharts = { bounds, number, ratioChart, moveChart, ternary, fromTernary, fromChart, BOX };
})(globalThis);
