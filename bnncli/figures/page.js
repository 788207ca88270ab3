for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  const key = (row, place) => {
    const cell = row.cells[place];
    return cell.dataset.sort === undefined ? null : Number(cell.dataset.sort);
  };
  heads.forEach((head, place) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", sign === 1 ? "ascending" : "descending");
      const sorted = [...body.rows].sort((a, b) => {
        const x = key(a, place), y = key(b, place);
        if (x !== null && y !== null) return sign * (x - y);
        if (x !== null || y !== null) return x === null ? 1 : -1;
        return sign * a.cells[place].textContent.localeCompare(b.cells[place].textContent);
      });
      body.append(...sorted);
    });
  });
}
