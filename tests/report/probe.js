// Runs inside the page (in a frame of the width to try) and tells the frame's parent what it found.
(() => {
  const errors = [];
  addEventListener("error", (event) => errors.push(String(event.message)));
  const complain = console.error;
  console.error = (...words) => { errors.push(words.join(" ")); complain(...words); };

  const name = (node) => `${node.tagName}.${node.getAttribute("class") ?? ""} ${node.textContent.slice(0, 40)}`;
  const meets = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;

  function overlaps() {
    const found = [];
    const groups = [
      ...[...document.querySelectorAll("svg.plot")].map((svg) => [...svg.querySelectorAll(":scope > text")]),
      ...[...document.querySelectorAll(".cards, .grid, .panels, .pair, .group, main, header")].map((box) => [...box.children]),
      ...[...document.querySelectorAll(".card, .panel, .head, .headline, .under, .legend, .key, .plain > li")].map((box) => [...box.children]),
    ];
    for (const group of groups) {
      const boxes = group.map((node) => [node, node.getBoundingClientRect()]).filter(([, box]) => box.width && box.height);
      boxes.forEach(([a, box], i) => boxes.slice(i + 1).forEach(([b, other]) => {
        if (meets(box, other)) found.push(`${name(a)} | ${name(b)}`);
      }));
    }
    // labels in a plot's margin must stay inside its card
    for (const text of document.querySelectorAll("svg.plot > text")) {
      const box = text.getBoundingClientRect(), card = text.closest(".card").getBoundingClientRect();
      if (box.left < card.left || box.right > card.right || box.bottom > card.bottom || box.top < card.top) found.push(`outside its card: ${name(text)}`);
    }
    return found;
  }

  function sorted() {
    const table = document.querySelector("#scores table.sortable");
    const button = table.tHead.rows[0].cells[0].querySelector("button");
    const order = () => [...table.tBodies[0].rows].map((row) => row.cells[0].dataset.key);
    button.click();
    const up = order(), first = button.parentElement.getAttribute("aria-sort");
    button.click();
    return { up, down: order(), first, second: button.parentElement.getAttribute("aria-sort") };
  }

  function tips() {
    const tip = document.getElementById("tip");
    const says = {};
    for (const [kind, svg] of [["lines", document.querySelector("#curves svg[data-lines]")], ["cells", document.querySelector("#routing svg[data-cells]")]]) {
      const box = svg.getBoundingClientRect();
      svg.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + 2, clientY: box.top + 2, bubbles: true }));
      says[kind] = { point: tip.textContent, shown: tip.style.visibility };
      svg.focus();
      svg.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
      says[kind].key = tip.textContent;
      svg.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape", bubbles: true }));
      says[kind].hidden = tip.style.visibility;
    }
    for (const svg of document.querySelectorAll("svg[data-lines], svg[data-cells]")) {
      const box = svg.getBoundingClientRect();
      svg.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + box.width / 2, clientY: box.top + box.height / 2, bubbles: true }));
      if (!tip.textContent) errors.push(`no hover text: ${svg.getAttribute("aria-label")}`);
      svg.dispatchEvent(new PointerEvent("pointerleave"));
    }
    return says;
  }

  function theme() {
    const ground = () => getComputedStyle(document.body).backgroundColor;
    const before = ground();
    document.getElementById("theme").click();
    const after = ground();
    document.getElementById("theme").click();
    return [before, after, ground()];
  }

  addEventListener("load", () => setTimeout(() => {
    const report = { width: innerWidth };
    try {
      document.querySelectorAll("details").forEach((details) => { details.open = true; });
      report.scroll = document.documentElement.scrollWidth;
      report.wide = [...document.querySelectorAll("body *")]
        .filter((node) => !node.closest(".scroll, pre, nav, .skip, #tip") && node.getBoundingClientRect().right > innerWidth + 1)
        .map(name);
      report.overlaps = overlaps();
      report.sorted = sorted();
      report.tips = tips();
      report.theme = theme();
      report.unnamed = [...document.querySelectorAll("svg[role=img]")].filter((svg) => !svg.getAttribute("aria-label")).length;
    } catch (error) {
      errors.push(String(error.stack));
    }
    report.errors = errors;
    parent.postMessage(report, "*");
  }, 100));
})();
