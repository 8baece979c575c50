"""Tests of the web page. They are a package so that they share a browser, which closes after the last one."""
