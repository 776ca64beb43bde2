"use strict";
// Sorts and filters long tables, and opens what a link or the printer leads into.
// Without it every row stands there, in the order in which it was written.

function number(text) {
  const found = /^[+−-]?(∞|[\d.]+(e[+−-]?\d+)?)/.exec(text);
  return found ? Number(found[0].replaceAll("−", "-").replace("∞", "Infinity")) : NaN;
}

function words(cell) {
  const parts = [...cell.childNodes].filter((node) => node.localName !== "small");
  return parts.map((node) => node.textContent).join("").trim();
}

const natural = new Intl.Collator("en", { numeric: true });

function compare(a, b) {
  const [x, y] = [number(a), number(b)];
  if (!Number.isNaN(x) && !Number.isNaN(y)) return x - y;
  if (Number.isNaN(x) !== Number.isNaN(y)) return Number.isNaN(x) ? 1 : -1;
  return natural.compare(a, b);
}

function element(name, properties, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

function equip(holder) {
  const body = holder.querySelector("tbody");
  const heads = [...holder.querySelectorAll("thead th")];
  const rows = [...body.rows];
  const named = holder.querySelector("table").getAttribute("aria-label") ?? "table";
  let [chosen, only] = ["", ""];

  function sort(column, direction) {
    heads.forEach((head, i) => {
      if (i === column && direction) {
        head.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
      } else {
        head.removeAttribute("aria-sort");
      }
    });
    const sorted = direction
      ? [...rows].sort((a, b) => direction * compare(words(a.cells[column]), words(b.cells[column])))
      : rows;
    body.append(...sorted);
  }

  heads.forEach((head, i) => {
    const press = element("button", { type: "button" }, ...head.childNodes);
    press.addEventListener("click", () => {
      const next = { ascending: -1, descending: 0 }[head.getAttribute("aria-sort")] ?? 1;
      sort(i, next);
    });
    head.append(press);
  });

  const count = element("output", {});
  function filter() {
    let shown = 0;
    for (const row of rows) {
      const badges = [...row.querySelectorAll(".badge")].map((one) => one.textContent);
      const fits = !only || badges.includes(only);
      row.hidden = !(fits && row.textContent.toLowerCase().includes(chosen));
      shown += !row.hidden;
    }
    count.textContent = shown < rows.length ? `${shown} of ${rows.length} rows` : `${shown} rows`;
  }

  const box = element("input", { type: "search", placeholder: "Filter rows" });
  box.setAttribute("aria-label", `Filter rows of ${named}`);
  box.addEventListener("input", () => {
    chosen = box.value.trim().toLowerCase();
    filter();
  });

  const kinds = [...new Set([...body.querySelectorAll(".badge")].map((one) => one.textContent))];
  const chips = kinds.map((kind) => {
    const total = rows.filter((row) =>
      [...row.querySelectorAll(".badge")].some((one) => one.textContent === kind),
    ).length;
    const chip = element("button", { type: "button" }, `${kind} (${total})`);
    chip.setAttribute("aria-pressed", "false");
    chip.addEventListener("click", () => {
      only = only === kind ? "" : kind;
      chips.forEach((other, i) => other.setAttribute("aria-pressed", String(only === kinds[i])));
      filter();
    });
    return chip;
  });

  const order = element("select", { className: "order" }, new Option("As written", ""));
  order.setAttribute("aria-label", `Order of ${named}`);
  heads.forEach((head, i) => order.append(new Option(`By ${head.textContent}`, String(i))));
  order.addEventListener("change", () => sort(Number(order.value), order.value ? 1 : 0));

  const tools = element("div", { className: "tools" }, box);
  if (kinds.length > 1) tools.append(...chips);
  tools.append(order, count);
  filter();
  holder.prepend(tools);
}

function reveal() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (let at = target; at; at = at.parentElement) if (at.localName === "details") at.open = true;
  target?.scrollIntoView();
}

document.querySelectorAll("[data-tools]").forEach(equip);
addEventListener("hashchange", reveal);
if (location.hash) reveal();

let closed = [];
addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll("details:not([open])")];
  closed.forEach((one) => (one.open = true));
});
addEventListener("afterprint", () => closed.forEach((one) => (one.open = false)));
