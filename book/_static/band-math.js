/* The band of a token, in numbers: every f-divergence of the book, in log coordinates.
 *
 * A classic script, because browsers refuse module scripts on pages opened from disk; it also loads
 * in node, where the tests compare it with high-precision references. Notation as in the book:
 * p old probability, q new, r = q/p, c = (1-q)/(1-p), odds = p/(1-p), radius in the divergence's
 * own unit.
 */
(function (root) {
  "use strict";

  // f normalized to f'(1) = 0 (adding k (u - 1) leaves the divergence as it is), so that both terms
  // of a binary divergence are >= 0. Given s = log u and h = u - 1, neither of which cancels.
  const GENERATORS = {
    kl: { atZero: Infinity, f: (s, h) => h - s },
    reverse_kl: { atZero: 1, f: (s, h) => (1 + h) * s - h },
    tv: { atZero: 0.5, f: (s, h) => 0.5 * Math.abs(h) },
    chi2: { atZero: 1, f: (s, h) => h * h },
    neyman: { atZero: Infinity, f: (s, h) => h * (h / (1 + h)) },
    hellinger: { atZero: 1, f: (s) => Math.expm1(0.5 * s) ** 2 },
    le_cam: { atZero: 1, f: (s, h) => h * (h / (2 + h)) },
    jensen_shannon: {
      atZero: 0.5 * Math.LN2,
      f: (s, h) => 0.5 * ((1 + h) * (s - Math.log1p(0.5 * h)) - Math.log1p(0.5 * h)),
    },
  };

  /** Cressie-Read, f(u) = (u^a - a u + a - 1) / (a (a - 1)); a = 0 and 1 are the two KL. */
  function power(a) {
    if (a === 0) return GENERATORS.kl;
    if (a === 1) return GENERATORS.reverse_kl;
    const scale = a * (a - 1);
    // u (u^(a-1) - 1): a product would be 0 times infinity for u -> 0
    const lifted = (s, h) => {
      const x = (a - 1) * s;
      return x > 1 ? Math.exp(a * s) - Math.exp(s) : (1 + h) * Math.expm1(x);
    };
    return {
      atZero: a > 0 ? 1 / a : Infinity,
      // each form is free of cancellation at its own limit
      f: a < 0.5
        ? (s, h) => (Math.expm1(a * s) - a * h) / scale
        : (s, h) => (lifted(s, h) - (a - 1) * h) / scale,
    };
  }

  /** The exponent of "alpha:VALUE", or null for a plain name. */
  function exponent(name) {
    if (!name.startsWith("alpha:")) return null;
    const text = name.slice(6).trim();
    const value = Number(text);
    if (text === "" || !Number.isFinite(value)) {
      throw new RangeError(`divergence ${name}: what follows alpha: must be a finite number`);
    }
    return value;
  }

  function generator(name) {
    const a = exponent(name);
    if (a !== null) return power(a);
    if (!Object.hasOwn(GENERATORS, name)) {
      throw new RangeError(
        `unknown divergence ${name}; known are ${Object.keys(GENERATORS).join(", ")}, alpha:<number>`
      );
    }
    return GENERATORS[name];
  }

  const value = (gen, s, h) => (s === -Infinity ? gen.atZero : gen.f(s, h));

  // ---- lower bounds: log r as a function of p, 1 - p and the radius ----

  const log1m = (x) => (x < 1 ? Math.log1p(-x) : -Infinity);

  const CLOSED = {
    tv: (p, notP, radius) => log1m(radius / p),
    chi2: (p, notP, radius) => log1m(Math.sqrt((radius * notP) / p)),
    neyman: (p, notP, radius) =>
      -Math.log1p((radius + Math.sqrt(radius * (radius + 4 * p * notP))) / (2 * p)),
    hellinger: (p, notP, radius) =>
      2 * log1m(0.5 * radius + Math.sqrt((notP / p) * radius * Math.max(1 - 0.25 * radius, 0))),
    le_cam(p, notP, radius) {
      const d = Math.sqrt(radius * (radius + 8 * p * notP));
      const lean = radius * (notP - p);
      // (d - lean) / ((2 + radius) p) in both cases; the first form does not cancel for p < 1/2
      return log1m(p < 0.5 ? (4 * notP * radius) / (d + lean) : (d - lean) / ((2 + radius) * p));
    },
    kl: lowerKL,
  };

  /** Newton from below on a convex function: no bracket, and no step overshoots. */
  function lowerKL(p, notP, radius) {
    let t = -(radius / p + Math.sqrt((2 * radius * notP) / p));
    for (let step = 0; step < 5; step += 1) {
      const gone = -Math.expm1(t);
      const h = (p / notP) * gone; // c - 1
      t -= (-p * t - notP * Math.log1p(h) - radius) / ((-(p / notP) * gone) / (1 + h));
    }
    return t;
  }

  /** Bisection on log(-log r): the relative accuracy of log r is that of the last bracket. */
  function lowerByBisection(gen, p, notP, radius) {
    const excess = (t) => {
      const h = (-p / notP) * Math.expm1(t);
      return p * value(gen, t, Math.expm1(t)) + notP * value(gen, Math.log1p(h), h) - radius;
    };
    if (excess(-Infinity) <= 0) return -Infinity;
    let near = -60;
    let far = 60;
    for (let step = 0; step < 64; step += 1) {
      const middle = 0.5 * (near + far);
      if (excess(-Math.exp(middle)) > 0) far = middle;
      else near = middle;
    }
    return -Math.exp(0.5 * (near + far));
  }

  function lowerLog(name, p, notP, radius) {
    const closed = Object.hasOwn(CLOSED, name) ? CLOSED[name] : null;
    return closed ? closed(p, notP, radius) : lowerByBisection(generator(name), p, notP, radius);
  }

  function check(p, radius) {
    if (!(p > 0 && p < 1)) throw new RangeError(`p must lie between 0 and 1, got ${p}`);
    if (!(radius > 0 && radius < Infinity)) {
      throw new RangeError(`radius must be positive and finite, got ${radius}`);
    }
  }

  /** {logLower, logUpper, lower, upper, lowerSaturates, upperSaturates} for one token. */
  function band(p, name, radius) {
    check(p, radius);
    const a = exponent(name);
    if (a === 0 || a === 1) return band(p, a === 0 ? "kl" : "reverse_kl", radius);
    const notP = 1 - p;
    const logLower = lowerLog(name, p, notP, radius);
    // The upper bound is the lower bound of everything but the token, seen from the token.
    const logC = lowerLog(name, notP, p, radius);
    const logUpper = logC === -Infinity ? -Math.log(p) : Math.log1p((-notP / p) * Math.expm1(logC));
    return {
      logLower,
      logUpper,
      lower: Math.exp(logLower),
      upper: Math.exp(logUpper),
      lowerSaturates: logLower === -Infinity,
      upperSaturates: logC === -Infinity,
    };
  }

  /** D_f(Q||P) of two finite distributions; every P_i must be positive. */
  function divergence(Q, P, name) {
    const gen = generator(name);
    return P.reduce((sum, p, i) => {
      const h = (Q[i] - p) / p;
      return sum + p * value(gen, Q[i] > 0 ? Math.log1p(h) : -Infinity, h);
    }, 0);
  }

  /** Boundary of the trust region around P on the three-token simplex.
   *
   * Each ray from P leaves the region once, since it is convex. Two rays keep the proportions of
   * the tokens other than the first: there the first coordinate takes its extremes.
   */
  function ball(P, name, radius, rays = 240) {
    check(P[0], radius);
    const rest = P[1] + P[2];
    const exact = [1, -P[1] / rest, -P[2] / rest];
    const start = Math.atan2(exact[0] * Math.sqrt(3), exact[2] - exact[1]);
    const points = [];
    for (let i = 0; i < 2 * Math.ceil(rays / 2); i += 1) {
      const angle = start + (Math.PI * i) / Math.ceil(rays / 2);
      const up = Math.sin(angle) / Math.sqrt(3);
      const across = Math.cos(angle);
      points.push(leave(P, [2 * up, -up - across, -up + across], name, radius));
    }
    return points;
  }

  /** Where the ray P + t D leaves the simplex or the region, whichever comes first. */
  function leave(P, D, name, radius) {
    let far = Math.min(...D.map((d, i) => (d < 0 ? -P[i] / d : Infinity)));
    const at = (t) => P.map((p, i) => Math.max(p + t * D[i], 0));
    if (divergence(at(far), P, name) <= radius) return at(far);
    let near = 0;
    for (let step = 0; step < 50; step += 1) {
      const middle = 0.5 * (near + far);
      if (divergence(at(middle), P, name) > radius) far = middle;
      else near = middle;
    }
    return at(near);
  }

  const BandMath = { names: Object.keys(GENERATORS), band, divergence, ball };
  if (typeof module !== "undefined") module.exports = BandMath;
  else root.BandMath = BandMath;
})(globalThis);
