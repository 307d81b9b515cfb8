"""A real Chromium, where there is one: playwright's own, or one on the PATH."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_BROWSER_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_INSTALL_HINT = "pip install playwright, and `playwright install chromium` or your system's package of it"


@contextmanager
def chromium() -> Iterator[Any]:
    """A headless browser; skips the test where there is none."""
    sync = pytest.importorskip("playwright.sync_api", reason=f"needs a browser: {_INSTALL_HINT}")
    with sync.sync_playwright() as playwright:
        own = playwright.chromium.executable_path
        found = own if Path(own).is_file() else next(filter(None, map(shutil.which, _BROWSER_NAMES)), None)
        if found is None:
            pytest.skip(f"needs a Chromium: {_INSTALL_HINT}")
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


class PageVisit:
    """A page that was opened, with everything it said and asked for."""

    def __init__(self, browser: Any, url: str, *, dark: bool = False) -> None:
        self.tab = browser.new_page(
            viewport={"width": 1280, "height": 800}, color_scheme="dark" if dark else "light"
        )
        self.messages: list[str] = []
        self.requested_urls: list[str] = []
        self.tab.on("console", lambda message: self.messages.append(f"{message.type}: {message.text}"))
        self.tab.on("pageerror", lambda error: self.messages.append(f"error: {error}"))
        self.tab.on("request", lambda request: self.requested_urls.append(request.url))
        self.tab.goto(url)

    def chosen(self) -> str:
        """Id of the node that the list marks as chosen."""
        found = self.tab.eval_on_selector_all(
            "#tree [aria-pressed=true]", "all => all.map(g => g.dataset.node)"
        )
        assert len(found) == 1
        return str(found[0])

    def heading(self) -> str:
        """Of the pane that shows the chosen node."""
        return str(self.tab.inner_text("#node h3"))


LOW_CONTRAST_SCRIPT = """
() => {
  const lit = (c) => { const x = c / 255; return x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4; };
  const of = (rgb) => 0.2126 * lit(rgb[0]) + 0.7152 * lit(rgb[1]) + 0.0722 * lit(rgb[2]);
  const parse = (text) => (text.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const opaque = (rgb) => rgb.length < 4 || rgb[3] === 1;
  const found = [];
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.checkVisibility() || e.disabled || ["SCRIPT", "title"].includes(e.tagName)) continue;
    const style = getComputedStyle(e);
    const ink = parse(e instanceof SVGElement ? style.fill : style.color);
    let behind = e, paper = null;
    while (behind && !(paper && opaque(paper))) {
      paper = parse(getComputedStyle(behind).backgroundColor);
      behind = behind.parentElement;
    }
    const [a, b] = [of(ink), of(paper)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) found.push(`${e.tagName}.${e.getAttribute("class")}: ${ratio.toFixed(2)}`);
  }
  return [...new Set(found)];
}
"""
"""Elements whose text has less than the 4.5 : 1 contrast that WCAG 2.1 asks for (1.4.3, level AA)."""
