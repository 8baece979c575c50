"""The documentation as a site: `make site` writes it to build/site/html, to be read from a disk or any web server.

`pages.py` copies the pages of the repository at their own paths, so that their links hold. `reference.py` writes pages
from the code. Zensical makes HTML of them, with a search that needs no server. `links.py` checks every link.
"""
