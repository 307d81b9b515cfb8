"use strict";
const table = document.getElementById("problems");
if (table) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells], rows = [...body.rows];
  const texts = rows.map((row) => [...row.cells].map((cell) => cell.textContent).join(" ").toLowerCase());
  const collator = new Intl.Collator("en", { numeric: true });
  const value = (row, column, order) => {
    const cell = row.cells[column];
    return order === "number" ? Number(cell.dataset.value) : cell.textContent;
  };
  heads.forEach((head, column) => {
    const button = head.querySelector("button"), order = head.dataset.order;
    if (!button) return;
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const keyed = rows.map((row, place) => [value(row, column, order), place, row]);
      keyed.sort((a, b) => (order === "number" ? a[0] - b[0] : collator.compare(a[0], b[0])) * (up ? 1 : -1) || a[1] - b[1]);
      body.append(...keyed.map((one) => one[2]));
    });
  });
  const filter = document.getElementById("filter"), count = document.getElementById("count");
  filter.addEventListener("input", () => {
    const wanted = filter.value.toLowerCase();
    let shown = 0;
    rows.forEach((row, place) => {
      row.hidden = !texts[place].includes(wanted);
      shown += row.hidden ? 0 : 1;
    });
    count.textContent = wanted ? `${shown} of ${rows.length} are shown.` : "";
  });
}
