"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  let chosen = "", view = "inline";
  const AROUND = 3;
  const byId = (name) => document.getElementById(name);

  // Everything that comes from sources and models goes through textContent: it is never markup.
  function make(tag, css, text, ...children) {
    const found = document.createElement(tag);
    if (css) found.className = css;
    if (text !== undefined && text !== null) found.textContent = text;
    found.append(...children);
    return found;
  }
  const drawn = () => [...document.querySelectorAll("#tree [data-node]")];
  const mark = (name) => drawn().find((g) => g.dataset.node === name);

  function choose(name, focus) {
    if (!data.nodes[name]) return;
    chosen = name;
    for (const g of drawn()) g.setAttribute("aria-pressed", g.dataset.node === name);
    show();
    reveal();
    if (focus && mark(name)) mark(name).focus({ preventScroll: true });
  }

  function reveal() {
    const g = mark(chosen), box = byId("tree");
    if (!g) return;
    const at = g.getBoundingClientRect(), around = box.getBoundingClientRect();
    if (at.top < around.top || at.bottom > around.bottom) box.scrollTop += at.top - around.top - box.clientHeight / 2;
  }

  function show() {
    const node = data.nodes[chosen], box = byId("node");
    box.replaceChildren();
    if (!node) { box.append(make("p", "", "No node is chosen.")); return; }
    box.append(make("h3", "", `${node.label}: ${node.result}`));
    if (node.note) box.append(make("p", "", node.note));
    const facts = make("div", "columns");
    for (const [name, pairs] of node.facts) {
      const list = make("dl", "", null, make("h4", "", name));
      for (const [key, value] of pairs) {
        const dd = make("dd", "");
        if (data.nodes[value]) {
          const link = make("button", "link", data.nodes[value].label);
          link.type = "button"; link.dataset.node = value;
          dd.append(link);
        } else dd.textContent = value;
        list.append(make("dt", "", key), dd);
      }
      facts.append(list);
    }
    box.append(make("div", "facts", null, facts));
    if (node.feedback) box.append(make("pre", node.ran ? "feedback ran" : "feedback", node.feedback));
    const now = node.parent ? view : "source";
    const tabs = make("div", "tabs");
    tabs.setAttribute("role", "group");
    tabs.setAttribute("aria-label", "How the source is shown");
    for (const [key, name] of [["inline", "Difference"], ["split", "Side by side"], ["source", "Source"]]) {
      const tab = make("button", "", name);
      tab.type = "button"; tab.dataset.view = key;
      tab.setAttribute("aria-pressed", key === now);
      if (key !== "source" && !node.parent) tab.disabled = true;
      tabs.append(tab);
    }
    if (node.cut) tabs.append(make("span", "soft", "The source is cut here: it is in the search's folder whole."));
    box.append(tabs);
    document.querySelector(".lineage").classList.toggle("wide", now === "split");
    const code = make("div", "code");
    code.tabIndex = 0;
    code.setAttribute("role", "region");
    code.setAttribute("aria-label", "Source");
    code.append(body(node, now));
    box.append(code);
  }

  function body(node, now) {
    const after = data.sources[node.source], parent = data.nodes[node.parent];
    if (!after) return make("p", "", "This page has no room for its source; it is in the search's folder.");
    if (now === "source") return whole(after);
    const before = parent && data.sources[parent.source];
    if (!before || !node.steps) return make("p", "", "This page has no room for the source of its parent.");
    if (node.steps.every((s) => s[0] === "equal")) return make("p", "", "Nothing that is shown differs from the parent.");
    return now === "split" ? split(before, after, node.steps) : inline(before, after, node.steps);
  }

  function line(css, ...cells) {
    const row = make("tr", css);
    for (const [kind, text] of cells) row.append(text instanceof Node ? text : make("td", kind, text));
    return row;
  }
  function whole(lines) {
    const table = make("table");
    lines.forEach((text, n) => table.append(line("", ["no", n + 1], ["", text])));
    return table;
  }
  // What two lines share at both ends stays plain; the middle is marked.
  function pair(a, b) {
    let start = 0, end = 0;
    const most = Math.min(a.length, b.length);
    while (start < most && a[start] === b[start]) start++;
    while (end < most - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end++;
    const cell = (text, css) => {
      const td = make("td", css);
      td.append(text.slice(0, start), make("b", "", text.slice(start, text.length - end)), text.slice(text.length - end));
      return td;
    };
    return start + end ? [cell(a, "removed"), cell(b, "added")] : [make("td", "removed", a), make("td", "added", b)];
  }
  // Long equal stretches keep a few lines at each end.
  function around(step, first, last, put, gap) {
    const [, i, iEnd, j] = step, n = iEnd - i;
    const head = first ? 0 : AROUND, tail = last ? 0 : AROUND;
    for (let k = 0; k < n; k++) {
      if (k >= head && k < n - tail && n > head + tail + 1) {
        gap(n - head - tail);
        k = n - tail - 1;
      } else put(i + k, j + k);
    }
  }
  function inline(a, b, steps) {
    const table = make("table");
    steps.forEach((step, at) => {
      const [tag, i, iEnd, j, jEnd] = step;
      if (tag === "equal") {
        around(step, at === 0, at === steps.length - 1,
          (x, y) => table.append(line("", ["no", x + 1], ["no", y + 1], ["", a[x]])),
          (n) => table.append(skipped(n, 3)));
        return;
      }
      const both = iEnd - i === jEnd - j ? a.slice(i, iEnd).map((x, k) => pair(x, b[j + k])) : null;
      for (let x = i; x < iEnd; x++) table.append(line("removed", ["no", x + 1], ["no", "-"], ["removed", both ? both[x - i][0] : a[x]]));
      for (let y = j; y < jEnd; y++) table.append(line("added", ["no", "+"], ["no", y + 1], ["added", both ? both[y - j][1] : b[y]]));
    });
    return table;
  }
  function split(a, b, steps) {
    const table = make("table", "split");
    steps.forEach((step, at) => {
      const [tag, i, iEnd, j, jEnd] = step;
      if (tag === "equal") {
        around(step, at === 0, at === steps.length - 1,
          (x, y) => table.append(line("", ["no", x + 1], ["", a[x]], ["no", y + 1], ["", b[y]])),
          (n) => table.append(skipped(n, 4)));
        return;
      }
      for (let k = 0; k < Math.max(iEnd - i, jEnd - j); k++) {
        const left = i + k < iEnd, right = j + k < jEnd;
        const [x, y] = left && right ? pair(a[i + k], b[j + k]) : [null, null];
        table.append(line("",
          ["no", left ? i + k + 1 : ""], left ? (x ? ["", x] : ["removed", a[i + k]]) : ["absent", ""],
          ["no", right ? j + k + 1 : ""], right ? (y ? ["", y] : ["added", b[j + k]]) : ["absent", ""]));
      }
    });
    return table;
  }
  function skipped(n, columns) {
    const td = make("td", "", `${n} equal lines`);
    td.colSpan = columns;
    return make("tr", "gap", null, td);
  }

  document.addEventListener("click", (event) => {
    const target = event.target.closest("[data-node], [data-view]");
    if (!target) return;
    if (target.dataset.view) {
      view = target.dataset.view;
      show();
      reveal();
      document.querySelector(`[data-view="${view}"]`).focus();
    } else {
      const inside = target.closest("#tree");
      choose(target.dataset.node, Boolean(inside));
      if (!inside && !target.closest("#node")) byId("lineage").scrollIntoView();
    }
  });
  choose(data.best, false);
  if (!data.nodes[chosen]) show();
})();
