"""Looks at a built site in Chromium: `python tests/project/check_browser.py build/site`.

Every page, on a phone in dark and on a desktop in light: nothing reaches past the right edge of the
window, code can be scrolled, and the console has no error. Dark is dark, and search finds a page.
`CHROMIUM` names the browser, if it is not on PATH. Needs playwright (`make docs-browser`).
"""

import contextlib
import functools
import http.server
import json
import os
import shutil
import sys
import tempfile
import threading
from pathlib import Path

from playwright.sync_api import sync_playwright

WINDOWS = {"phone": (390, 844, "dark"), "desktop": (1400, 900, "light")}
WORD = "fused_experts_lora"
# Elements that reach past the window without a parent that scrolls or clips them.
OUTSIDE = """() => {
  const width = document.documentElement.clientWidth, outside = [];
  const held = e => { for (let p = e.parentElement; p && p !== document.body; p = p.parentElement)
    if (getComputedStyle(p).overflowX !== "visible") return true; return false; };
  for (const e of document.body.querySelectorAll("*")) {
    const box = e.getBoundingClientRect();
    if (box.width && box.left < width && box.right > width + 1 && !held(e))
      outside.push(`${e.tagName} ${e.className}: ${e.textContent.trim().slice(0, 60)}`);
  }
  const scrolls = e => ["auto", "scroll"].includes(getComputedStyle(e).overflowX);
  for (const e of document.querySelectorAll("pre > code"))
    if (e.scrollWidth > e.clientWidth + 1 && !scrolls(e) && !held(e))
      outside.push("code is cut off: " + e.textContent.trim().slice(0, 60));
  if (document.documentElement.scrollWidth > width) outside.push("the page scrolls sideways");
  return outside;
}"""


# Of the first color that is not transparent, from the body up: the largest of red, green and blue.
BRIGHTNESS = """() => {
  for (let e = document.querySelector("main"); e; e = e.parentElement) {
    const parts = getComputedStyle(e).backgroundColor.match(/[\\d.]+/g).map(Number);
    if (parts.length < 4 || parts[3]) return Math.max(...parts.slice(0, 3));
  }
  return 255;
}"""


@contextlib.contextmanager
def served(site):
    """The site as one version among those that mike publishes."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with tempfile.TemporaryDirectory() as root:
        Path(root, "main").symlink_to(site.resolve())
        versions = [{"version": "main", "title": "main", "aliases": []}]
        Path(root, "versions.json").write_text(json.dumps(versions))
        handler = functools.partial(Quiet, directory=root)
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield f"http://127.0.0.1:{server.server_port}/main"
            server.shutdown()


def problems(site, browser):
    """What is wrong, in lines."""
    found, errors = [], []
    pages = sorted(p.parent.relative_to(site).as_posix() for p in site.rglob("index.html"))
    with served(site) as url:
        for window, (width, height, scheme) in WINDOWS.items():
            tab = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            tab.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
            tab.on("pageerror", lambda error: errors.append(str(error)))
            tab.on("response", lambda r: errors.append(r.url) if r.status >= 400 else None)
            for page in pages:
                tab.goto(f"{url}/{page}/", wait_until="load")
                found += [f"{page}, {window}: {line}" for line in tab.evaluate(OUTSIDE)]
                found += [f"{page}, {window}: console: {line}" for line in errors]
                errors.clear()
            if (tab.evaluate(BRIGHTNESS) < 128) != (scheme == "dark"):
                found.append(f"{window}: the background is not {scheme}")
            tab.close()
        tab = browser.new_page()
        tab.goto(url)
        tab.fill("input[name=query], input[type=search], .md-search__input", WORD)
        try:
            tab.wait_for_selector(f"a[href]:has-text('{WORD}'):visible", timeout=10_000)
        except Exception as error:  # playwright's own timeout
            found.append(f"search for {WORD}: {error}")
    return found


def main(site):
    name = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if name is None:
        sys.exit("no chromium on PATH: install Debian's package, or name a browser by CHROMIUM")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=name, args=["--no-sandbox"])
        found = problems(site, browser)
        browser.close()
    print(*found or ["site: every page fits a phone and a desktop"], sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
