"use strict";
// Without this script the tables are the same, but for the order of their rows.
for (const table of document.querySelectorAll("table")) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const descending = heading.getAttribute("aria-sort") === "ascending";
      for (const other of headings) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
      const body = table.tBodies[0];
      body.append(...[...body.rows].sort((a, b) => compare(a.cells[column], b.cells[column], descending)));
    });
  });
}

// Numbers come before words, and what is not known comes last, whichever way it goes.
function compare(a, b, descending) {
  const ranks = [a, b].map((cell) => (cell.dataset.value ? 0 : cell.textContent === "–" ? 2 : 1));
  if (ranks[0] !== ranks[1]) return ranks[0] - ranks[1];
  const order = ranks[0] === 0
    ? Number(a.dataset.value) - Number(b.dataset.value)
    : a.textContent.localeCompare(b.textContent, "en", { numeric: true });
  return descending ? -order : order;
}

addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
});
