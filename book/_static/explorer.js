/* The explorer page: controls, the address that carries the state, pointer and keys. */
(function () {
  "use strict";

  const host = document.getElementById("explorer-app");
  if (!host) return;
  const { bounds, number, ratioChart, moveChart, ternary, fromTernary, fromChart, BOX } = BandCharts;

  const DIVERGENCES = {
    kl: "KL, old ‖ new", reverse_kl: "reverse KL, new ‖ old", tv: "total variation", chi2: "χ² (Pearson)",
    neyman: "χ² (Neyman)", hellinger: "squared Hellinger", le_cam: "Le Cam", jensen_shannon: "Jensen–Shannon",
    alpha: "α (Cressie–Read)",
  };
  const between = (low, high) => (text) => {
    const v = Number(text);
    return String(text).trim() !== "" && v >= low && v <= high ? v : undefined;
  };
  const oneOf = (...choices) => (text) => (choices.includes(text) ? text : undefined);

  // key: default, what a text must be to count, and how to say so
  const FIELDS = {
    divergence: { start: "kl", parse: oneOf(...Object.keys(DIVERGENCES)), rule: "one of the listed divergences" },
    alpha: { start: 0.5, parse: between(-10, 10), rule: "between −10 and 10" },
    radius: { start: 0.05, parse: between(1e-4, 5), rule: "between 0.0001 and 5" },
    p: { start: 0.1, parse: between(1e-8, 1 - 1e-7), rule: "between 0.00000001 and 0.9999999" },
    share: { start: 0.6, parse: between(0.01, 0.99), rule: "between 0.01 and 0.99" },
    low: { start: 0.2, parse: between(0, 1), rule: "between 0 and 1" },
    high: { start: 0.28, parse: between(0, 100), rule: "between 0 and 100" },
    cap: {
      start: null,
      parse: (text) => (["", "none"].includes(String(text).trim()) ? null : between(1, 1e6)(text)),
      rule: "at least 1, or empty for no cap",
    },
    axis: { start: "log", parse: oneOf("log", "linear"), rule: "log or linear" },
  };
  const defaults = () => Object.fromEntries(Object.entries(FIELDS).map(([key, field]) => [key, field.start]));
  let state = defaults();

  // ---- the address ----

  const write = (values) =>
    "#" + Object.keys(FIELDS).map((key) => `${key}=${values[key] === null ? "none" : values[key]}`).join("&");

  /** State in a text like "p=0.1&radius=0.05" on top of the defaults, and the keys not understood. */
  function read(text) {
    const values = defaults();
    const refused = [];
    for (const [key, raw] of new URLSearchParams(text.replace(/^#/, ""))) {
      const value = Object.hasOwn(FIELDS, key) ? FIELDS[key].parse(raw) : undefined;
      if (value === undefined) refused.push(`${key}=${raw}`);
      else values[key] = value;
    }
    return { values, refused };
  }

  function readAddress() {
    if (!location.hash.includes("=")) return;
    const { values, refused } = read(location.hash);
    state = values;
    show();
    if (refused.length) say(`Ignored in the address: ${refused.join(", ")}.`);
  }

  // ---- controls ----

  // A slider works on its own scale: `to` maps a value there, `from` maps it back.
  const significant = (v, digits) => Number(v.toPrecision(digits));
  const logistic = (z) => {
    const p = 1 / (1 + Math.exp(-z));
    return p < 0.5 ? significant(p, 3) : 1 - significant(1 - p, 3);
  };
  const identity = { to: (v) => v, from: (z) => significant(z, 4) };
  const SLIDERS = {
    p: { min: -11.5, max: 9.2, step: 0.05, to: (p) => Math.log(p / (1 - p)), from: (z) => significant(logistic(z), 7) },
    radius: { min: -3, max: 0.3, step: 0.01, to: Math.log10, from: (z) => significant(10 ** z, 3) },
    alpha: { min: -3, max: 4, step: 0.05, ...identity },
    share: { min: 0.02, max: 0.98, step: 0.02, ...identity },
  };

  const slider = (key) => {
    const { min, max, step } = SLIDERS[key];
    return `<input type="range" id="be-${key}-slider" data-slider="${key}" min="${min}" max="${max}" step="${step}">`;
  };
  const box = (key, hint = "") =>
    `<input type="text" inputmode="decimal" autocomplete="off" id="be-${key}" data-box="${key}" placeholder="${hint}">`;
  const both = (key, label, name) =>
    `<div class="be-field be-wide" data-field="${key}"><label for="be-${key}">${label}</label>${box(key)}` +
    slider(key).replace(">", ` aria-label="${name}, slider">`) + "</div>";
  const single = (key, label, hint) =>
    `<div class="be-field"><label for="be-${key}">${label}</label>${box(key, hint)}</div>`;

  const picture = (id, title, role) =>
    `<figure class="be-figure"><figcaption>${title}</figcaption>` +
    `<svg id="${id}" role="${role}" viewBox="0 0 ${BOX.width} ${id === "be-ternary" ? 318 : BOX.height}"></svg></figure>`;

  host.innerHTML =
    `<form class="be-controls" aria-label="Settings of the explorer">
      <div class="be-field be-wide"><label for="be-divergence">divergence</label>
        <select id="be-divergence">${Object.entries(DIVERGENCES).map(([key, name]) => `<option value="${key}">${name}</option>`).join("")}</select></div>
      ${both("radius", "radius δ", "Radius delta")}
      ${both("alpha", "exponent α", "Exponent alpha")}
      ${both("p", "old probability p", "Old probability p")}
      <div class="be-row">${single("low", "clip ε below")}${single("high", "clip ε above")}${single("cap", "ratio cap", "none")}
        <fieldset class="be-field"><legend>axis of p</legend>
          <label><input type="radio" name="be-axis" value="log"> log</label>
          <label><input type="radio" name="be-axis" value="linear"> linear</label></fieldset></div>
    </form>
    <p id="be-status" class="be-status" role="status"></p>
    <p id="be-problem" class="be-problem" role="alert" hidden></p>
    <ul class="be-legend"><li><i class="be-key be-key-band"></i>band</li><li><i class="be-key be-key-clip"></i>fixed clip</li>
      <li id="be-legend-cap"><i class="be-key be-key-uncapped"></i>band without the cap</li><li><i class="be-key be-key-out"></i>outside the simplex</li></ul>
    <div class="be-pictures">${picture("be-ratio", "Bounds of the ratio", "slider")}${picture("be-move", "Allowed move of the probability", "img")}
      ${picture("be-ternary", "Trust region of three tokens", "img")}
      <div class="be-numbers"><table class="table"><caption>At this p</caption><thead><tr><td></td><th scope="col">band</th><th scope="col">fixed clip</th></tr></thead>
        <tbody id="be-table"></tbody></table>
        ${both("share", "share of b in the rest", "Share of token b in the rest")}
        <p class="be-links"><a id="be-link" href="#">Link to this view</a> <button type="button" id="be-reset">Reset</button></p></div></div>`;

  const find = (id) => document.getElementById(id);
  const ratio = find("be-ratio");
  ratio.setAttribute("tabindex", "0");
  ratio.setAttribute("aria-label", "Old probability p, on the chart of ratio bounds");
  ratio.setAttribute("aria-valuemin", "0");
  ratio.setAttribute("aria-valuemax", "1");

  // ---- showing a state ----

  function say(problem) {
    find("be-problem").textContent = problem;
    find("be-problem").hidden = problem === "";
  }

  function rows(b) {
    const p = state.p;
    const cell = (v, key, remark = "") =>
      `<td class="num" data-key="${key}" data-value="${v}">${number(v)}${remark && `<small>${remark}</small>`}</td>`;
    const outside = (q) => (q > 1 ? "leaves the simplex" : "");
    const row = (name, first, second) => `<tr><th scope="row">${name}</th>${first}${second}</tr>`;
    return (
      row("lowest ratio", cell(b.lower, "lower", b.lowerSaturates ? "may vanish" : ""), cell(b.clipLow, "clip-lower")) +
      row("highest ratio", cell(b.top, "upper", b.capped ? `cap; else ${number(b.upper)}` : b.upperSaturates ? "1/p: may take all" : ""), cell(b.clipHigh, "clip-upper", outside(p * b.clipHigh))) +
      row("lowest q", cell(p * b.lower, "q-lower"), cell(p * b.clipLow, "clip-q-lower")) +
      row("highest q", cell(p * b.top, "q-upper"), cell(p * b.clipHigh, "clip-q-upper")) +
      row("Δπ down", cell(p * (b.lower - 1), "move-down"), cell(-p * state.low, "clip-move-down")) +
      row("Δπ up", cell(p * (b.top - 1), "move-up"), cell(p * state.high, "clip-move-up"))
    );
  }

  let pending = 0;

  function show() {
    const b = bounds(state);
    const sentence =
      `At p = ${number(state.p)}, the band allows ratios from ${number(b.lower)} to ${number(b.top)}: ` +
      `q between ${number(state.p * b.lower)} and ${number(state.p * b.top)}.`;
    find("be-divergence").value = state.divergence;
    host.querySelector('[data-field="alpha"]').hidden = state.divergence !== "alpha";
    for (const input of host.querySelectorAll("[data-box]")) {
      if (input !== document.activeElement) input.value = state[input.dataset.box] ?? "";
    }
    for (const input of host.querySelectorAll("[data-slider]")) {
      const { to } = SLIDERS[input.dataset.slider];
      input.value = to(state[input.dataset.slider]);
      input.setAttribute("aria-valuetext", number(state[input.dataset.slider]));
    }
    for (const input of host.querySelectorAll('[name="be-axis"]')) input.checked = input.value === state.axis;
    find("be-legend-cap").hidden = state.cap === null;
    ratio.innerHTML = ratioChart(state);
    ratio.setAttribute("aria-valuenow", state.p);
    ratio.setAttribute("aria-valuetext", sentence);
    find("be-move").innerHTML = moveChart(state);
    find("be-move").setAttribute("aria-label", `Allowed move of the probability against p. Here from ${number(state.p * (b.lower - 1))} to ${number(state.p * (b.top - 1))}.`);
    find("be-ternary").innerHTML = ternary(state);
    find("be-ternary").setAttribute("aria-label", `Triangle of all distributions over three tokens. The trust region around the old policy spans q from ${number(state.p * b.lower)} to ${number(state.p * b.upper)}.`);
    find("be-table").innerHTML = rows(b);
    find("be-link").href = write(state);
    clearTimeout(pending);
    pending = setTimeout(() => { find("be-status").textContent = sentence; }, find("be-status").textContent ? 400 : 0);
  }

  /** Change some values; the address follows, without a new entry in the history. */
  function set(change) {
    state = { ...state, ...change };
    say("");
    for (const input of host.querySelectorAll("[aria-invalid]")) input.removeAttribute("aria-invalid");
    history.replaceState(null, "", write(state));
    show();
  }

  // ---- events ----

  host.addEventListener("input", ({ target }) => {
    if (target.dataset.slider) {
      const key = target.dataset.slider;
      set({ [key]: SLIDERS[key].from(Number(target.value)) });
    } else if (target.dataset.box) {
      const key = target.dataset.box;
      const value = FIELDS[key].parse(target.value.replace(",", "."));
      if (value !== undefined) set({ [key]: value });
      else {
        target.setAttribute("aria-invalid", "true");
        say(`${host.querySelector(`label[for="be-${key}"]`).textContent} must be ${FIELDS[key].rule}.`);
      }
    } else if (target.id === "be-divergence") set({ divergence: target.value });
    else if (target.name === "be-axis") set({ axis: target.value });
  });
  host.addEventListener("focusout", ({ target }) => {
    if (!target.dataset.box) return;
    target.value = state[target.dataset.box] ?? ""; // an unusable text gives way to the value shown
    target.removeAttribute("aria-invalid");
    say("");
  });
  host.querySelector("form").addEventListener("submit", (event) => event.preventDefault());
  find("be-reset").addEventListener("click", () => set(defaults()));

  ratio.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: -0.05, ArrowDown: -0.05, ArrowRight: 0.05, ArrowUp: 0.05, PageDown: -0.5, PageUp: 0.5 };
    const { min, max, to, from } = SLIDERS.p;
    const ends = { Home: min, End: max };
    if (!(event.key in steps) && !(event.key in ends)) return;
    event.preventDefault();
    const z = event.key in ends ? ends[event.key] : to(state.p) + steps[event.key];
    set({ p: from(Math.min(Math.max(z, min), max)) });
  });

  /** Call `move` with the drawing's own coordinates while a pointer is down on it. */
  function drag(svg, move) {
    const follow = (event) => {
      const area = svg.getBoundingClientRect();
      const scale = svg.viewBox.baseVal.width / area.width;
      set(move((event.clientX - area.left) * scale, (event.clientY - area.top) * scale));
    };
    svg.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      svg.setPointerCapture(event.pointerId);
      follow(event);
    });
    svg.addEventListener("pointermove", (event) => {
      if (svg.hasPointerCapture(event.pointerId)) follow(event);
    });
  }
  drag(ratio, (x) => ({ p: fromChart(x, state.axis) }));
  drag(find("be-move"), (x) => ({ p: fromChart(x, state.axis) }));
  drag(find("be-ternary"), fromTernary);

  // Links in the text, which comes after this script, carry the state that they set in data-state.
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[data-state]");
    if (!link) return;
    event.preventDefault();
    set(read(link.dataset.state).values);
    host.scrollIntoView();
  });
  addEventListener("hashchange", readAddress);

  show();
  readAddress();
})();
