"""Small models and data that come with stretto, so that a first run needs no download.

Run files reach them by target strings such as `stretto.examples.tiny_gpt:TinyGPT`; the run files
`default.yaml` and `digits.yaml` lie beside this file.
"""
