"use strict";
(() => {
  const root = document.documentElement;
  const store = {
    get: () => { try { return localStorage.getItem("moe-finetune-theme"); } catch { return null; } },
    set: (value) => { try { localStorage.setItem("moe-finetune-theme", value); } catch { /* private mode */ } },
  };
  // before the first paint
  if (store.get()) root.dataset.theme = store.get();

  function setUpTheme() {
    const button = document.getElementById("theme");
    const dark = () => root.dataset.theme
      ? root.dataset.theme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
    const show = () => { button.textContent = dark() ? "☀ Light" : "☾ Dark"; };
    button.addEventListener("click", () => {
      root.dataset.theme = dark() ? "light" : "dark";
      store.set(root.dataset.theme);
      show();
    });
    show();
  }

  const format = (value) => {
    if (value === null || Number.isNaN(value)) return "–";
    if (value !== 0 && (Math.abs(value) < 1e-4 || Math.abs(value) >= 1e7)) return value.toExponential(2).replace("-", "−");
    return String(Number(value.toPrecision(4))).replace("-", "−");
  };

  // Heat maps: values come as 16-bit levels, a frame after the other, and are painted a pixel a cell.
  const maps = new Map();
  function heatMap(svg) {
    if (maps.has(svg)) return maps.get(svg);
    const map = JSON.parse(svg.dataset.cells);
    const bytes = Uint8Array.from(atob(map.levels), (c) => c.charCodeAt(0)), levels = new DataView(bytes.buffer);
    const wide = map.columns.length, tall = map.rows.length;
    let frame = map.picks.at(-1);
    map.value = (row, column) => {
      const level = levels.getUint16(2 * ((frame * tall + row) * wide + column), true);
      return level === 65535 ? null : map.low + level / 65534 * (map.high - map.low);
    };
    map.paint = (place) => {
      frame = map.picks.at(place);
      const canvas = document.createElement("canvas"), colors = palette();
      canvas.width = wide;
      canvas.height = tall;
      const context = canvas.getContext("2d"), picture = context.createImageData(wide, tall);
      for (let cell = 0; cell < wide * tall; cell++) {
        const value = map.value(Math.floor(cell / wide), cell % wide);
        if (value === null) continue;
        const share = (value - map.limits[0]) / (map.limits[1] - map.limits[0]);
        const level = Math.round(255 * Math.min(1, Math.max(0, share)));
        picture.data.set(colors.subarray(4 * level, 4 * level + 4), 4 * cell);
      }
      context.putImageData(picture, 0, 0);
      svg.querySelector("image").setAttribute("href", canvas.toDataURL());
      const note = svg.closest(".panel")?.querySelector(".note");
      if (note && map.notes.length) note.textContent = map.notes.at(place);
    };
    maps.set(svg, map);
    return map;
  }

  let colors = null;
  // The 256 colors of the stylesheet's gradient.
  function palette() {
    if (colors) return colors;
    const stops = getComputedStyle(root).getPropertyValue("--sequential").match(/#\w+/g);
    const canvas = document.createElement("canvas");
    canvas.width = 256;
    canvas.height = 1;
    const context = canvas.getContext("2d"), gradient = context.createLinearGradient(0, 0, 256, 0);
    stops.forEach((color, i) => gradient.addColorStop(i / (stops.length - 1), color));
    context.fillStyle = gradient;
    context.fillRect(0, 0, 256, 1);
    return colors = context.getImageData(0, 0, 256, 1).data;
  }

  function setUpMaps() {
    for (const svg of document.querySelectorAll("svg[data-cells]")) heatMap(svg).paint(-1);
    for (const slider of document.querySelectorAll(".slider")) {
      const bar = slider.querySelector("input"), told = slider.querySelector("output"), play = slider.querySelector("button");
      const places = bar.dataset.places.split("\n"), figure = slider.closest("figure");
      const show = () => {
        told.textContent = places[bar.value];
        bar.setAttribute("aria-valuetext", places[bar.value]);
        figure.querySelectorAll("svg[data-cells]").forEach((svg) => heatMap(svg).paint(Number(bar.value)));
      };
      let timer = null;
      const stop = () => { clearInterval(timer); timer = null; play.textContent = "Play"; };
      bar.addEventListener("input", () => { stop(); show(); });
      play.addEventListener("click", () => {
        if (timer) { stop(); return; }
        if (bar.value === bar.max) bar.value = 0;
        show();
        play.textContent = "Pause";
        timer = setInterval(() => {
          bar.value = Number(bar.value) + 1;
          show();
          if (bar.value === bar.max) stop();
        }, 700);
      });
    }
  }

  function setUpFilters() {
    for (const box of document.querySelectorAll(".filtered")) {
      const text = box.querySelector(".filter-text"), expert = box.querySelector(".filter-expert");
      const rows = [...box.querySelectorAll("tbody tr")], told = box.querySelector(".filters output");
      const taken = rows.map((row) => [...row.cells].slice(2).flatMap((cell) => cell.textContent.replace(/\(\d+\)/g, "").match(/\d+/g) ?? []));
      const show = () => {
        const wanted = text.value.toLowerCase();
        rows.forEach((row, i) => {
          row.hidden = !row.cells[0].dataset.key.toLowerCase().includes(wanted) || Boolean(expert.value) && !taken[i].includes(expert.value);
        });
        told.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} tokens`;
      };
      text.addEventListener("input", show);
      expert.addEventListener("change", show);
    }
  }

  function setUpTips() {
    const tip = document.getElementById("tip");
    let follow = null; // puts the tip of a focused chart back in its place when the page scrolls
    const hide = () => { follow = null; tip.style.visibility = "hidden"; tip.textContent = ""; };
    const show = (text, x, y) => {
      tip.textContent = text;
      const left = x + 16 + tip.offsetWidth > innerWidth ? x - 12 - tip.offsetWidth : x + 16;
      const top = y + 16 + tip.offsetHeight > innerHeight ? y - 12 - tip.offsetHeight : y + 16;
      tip.style.transform = `translate(${Math.max(4, left)}px, ${Math.max(4, top)}px)`;
      tip.style.visibility = "visible";
    };
    const draw = (svg, name, attributes) => {
      let mark = svg.querySelector("." + name);
      if (!mark) {
        mark = document.createElementNS("http://www.w3.org/2000/svg", name === "cursor" ? "line" : "rect");
        mark.setAttribute("class", name);
        svg.append(mark);
      }
      for (const [key, value] of Object.entries(attributes)) mark.setAttribute(key, value);
    };
    const erase = (svg) => svg.querySelectorAll(":scope > .cursor, :scope > .frame").forEach((m) => m.remove());

    const nearest = (list, value) => {
      let low = 0, high = list.length - 1;
      while (high - low > 1) { const middle = (low + high) >> 1; if (list[middle] < value) low = middle; else high = middle; }
      return Math.abs(list[low] - value) <= Math.abs(list[high] - value) ? low : high;
    };
    // A reader says what lies at a place, and steps from place to place for the keyboard.
    const readers = {
      lines: (svg) => {
        const data = JSON.parse(svg.dataset.lines);
        const steps = [...new Set(data.series.flatMap((s) => s.x))].sort((a, b) => a - b);
        let at = steps.length - 1;
        const tell = () => {
          const step = steps[at];
          const place = 100 * (step - data.low) / (data.high - data.low) + "%";
          draw(svg, "cursor", { x1: place, x2: place, y1: "0", y2: "100%" });
          const lines = data.series.slice(0, 8).filter((s) => s.x.length)
            .map((s) => `${s.label}: ${format(s.y[nearest(s.x, step)])}`);
          if (data.series.length > 8) lines.push(`and ${data.series.length - 8} more`);
          return `${data.axis} ${format(step)}\n${lines.join("\n")}`;
        };
        return {
          point: (x) => { at = nearest(steps, data.low + x * (data.high - data.low)); return tell(); },
          move: (dx) => { at = Math.min(steps.length - 1, Math.max(0, at + dx)); return tell(); },
          place: () => [(steps[at] - data.low) / (data.high - data.low), 0.3],
        };
      },
      cells: (svg) => {
        const map = heatMap(svg), wide = map.columns.length, tall = map.rows.length;
        let row = 0, column = 0;
        const tell = () => {
          draw(svg, "frame", {
            x: 100 * column / wide + "%", y: 100 * row / tall + "%",
            width: 100 / wide + "%", height: 100 / tall + "%",
          });
          return `${map.rowName} ${map.rows[row]}, ${map.columnName} ${map.columns[column]}\n${format(map.value(row, column))} ${map.unit}`;
        };
        const within = (value, count) => Math.min(count - 1, Math.max(0, value));
        return {
          point: (x, y) => { column = within(Math.floor(x * wide), wide); row = within(Math.floor(y * tall), tall); return tell(); },
          move: (dx, dy) => { column = within(column + dx, wide); row = within(row + dy, tall); return tell(); },
          place: () => [(column + 0.5) / wide, (row + 0.5) / tall],
        };
      },
    };

    for (const svg of document.querySelectorAll("svg[role=img]")) {
      // the browser's own tooltip of <title> would cover ours: the same words as attributes
      const title = svg.querySelector(":scope > title"), desc = svg.querySelector(":scope > desc");
      if (title) { svg.setAttribute("aria-label", title.textContent); title.remove(); }
      if (desc) svg.setAttribute("aria-description", desc.textContent);
      const kind = svg.dataset.lines ? "lines" : svg.dataset.cells ? "cells" : null;
      if (!kind) continue;
      let reader = null;
      const read = () => (reader ??= readers[kind](svg));
      // the drawn area is the SVG itself; labels overflow into its margin
      const area = () => svg.getBoundingClientRect();
      svg.addEventListener("pointermove", (event) => {
        const box = area();
        const x = (event.clientX - box.left) / box.width, y = (event.clientY - box.top) / box.height;
        if (x < -0.02 || x > 1.02 || y < -0.02 || y > 1.02) { hide(); erase(svg); return; }
        show(read().point(x, y), event.clientX, event.clientY);
      });
      svg.addEventListener("pointerleave", () => { hide(); erase(svg); });
      svg.addEventListener("blur", () => { hide(); erase(svg); });
      svg.addEventListener("keydown", (event) => {
        const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
        if (event.key === "Escape") { hide(); erase(svg); }
        if (!step || (kind === "lines" && step[1])) return;
        event.preventDefault();
        const text = read().move(...step), [x, y] = read().place();
        follow = () => { const box = area(); show(text, box.left + x * box.width, box.top + y * box.height); };
        follow();
      });
    }
    document.addEventListener("pointerover", (event) => {
      const target = event.target.closest("[data-tip]");
      if (target) show(target.dataset.tip, event.clientX, event.clientY);
    });
    document.addEventListener("pointerout", (event) => { if (event.target.closest("[data-tip]")) hide(); });
    document.addEventListener("scroll", () => (follow ?? hide)(), { passive: true });
  }

  function setUpTables() {
    for (const table of document.querySelectorAll("table.sortable")) {
      const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
      heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        heads.forEach((h) => h.setAttribute("aria-sort", "none"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const key = (row) => row.cells[column].dataset.key;
        const rows = [...body.rows].sort((a, b) => {
          const [x, y] = [key(a), key(b)];
          if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
          const order = Number.isNaN(Number(x)) || Number.isNaN(Number(y)) ? x.localeCompare(y) : x - y;
          return down ? -order : order;
        });
        body.append(...rows);
      }));
    }
  }

  function setUpCopying() {
    for (const button of document.querySelectorAll(".copy")) {
      const code = button.closest(".command").querySelector("code");
      button.addEventListener("click", async () => {
        try {
          await navigator.clipboard.writeText(code.textContent);
          button.textContent = "Copied";
          setTimeout(() => { button.textContent = "Copy"; }, 1500);
        } catch {
          getSelection().selectAllChildren(code);
          button.textContent = "Selected";
        }
      });
    }
  }

  function setUpMenu() {
    const links = new Map([...document.querySelectorAll("nav a")].map((a) => [a.hash.slice(1), a]));
    const seen = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        if (!entry.isIntersecting) continue;
        links.forEach((a) => a.removeAttribute("aria-current"));
        links.get(entry.target.id)?.setAttribute("aria-current", "true");
      }
    }, { rootMargin: "-15% 0px -75% 0px" });
    links.forEach((_, id) => seen.observe(document.getElementById(id)));
  }

  // On a phone every section but the first is folded; a link to one unfolds it.
  function setUpFolding() {
    const unfold = () => {
      const part = location.hash && document.getElementById(location.hash.slice(1))?.querySelector(".part");
      if (part) part.open = true;
    };
    if (matchMedia("(max-width: 640px)").matches) document.querySelectorAll(".part").forEach((part) => { part.open = false; });
    addEventListener("hashchange", unfold);
    document.querySelectorAll("nav a").forEach((a) => a.addEventListener("click", () => setTimeout(unfold)));
    unfold();
  }

  document.addEventListener("DOMContentLoaded", () => {
    setUpTheme();
    setUpMaps();
    setUpFilters();
    setUpTips();
    setUpTables();
    setUpCopying();
    setUpMenu();
    setUpFolding();
  });
})();
