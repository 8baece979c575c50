"""Tests of the web page. As a package they share a browser, which closes behind the last of them."""
