"""Makes links that leave docs/ work on the site.

The pages link to files of the repository, such as ../benchmarks/results/cpu_ring.json, so that
they can be followed in a copy of it. The site gets a copy of each of these files at the same path,
and the links are rewritten to it.
"""

import pathlib
import posixpath
import re

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).parents[1]
COPIED = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "SECURITY.md",
    "benchmarks/results/*.json",
    "examples/*.py",
)
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")


def on_files(files, *, config):
    for pattern in COPIED:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, *, page, config, files):
    """Rewrites relative links from the repository's tree to the site's."""
    source = page.file.src_uri
    outside = (ROOT / source).exists()  # a copied page, at home beside docs/ and not in it
    place = source if outside else f"docs/{source}"

    def rewrite(match):
        target = posixpath.normpath(posixpath.join(posixpath.dirname(place), match[2]))
        on_site = target.removeprefix("docs/")
        relative = posixpath.relpath(on_site, posixpath.dirname(source) or ".")
        return f"{match[1]}{relative}{match[3]}"

    return LINK.sub(rewrite, markdown)
