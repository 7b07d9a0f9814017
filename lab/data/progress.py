"""Progress bars: tqdm on a terminal and in a notebook, a line every LOG_SECONDS in a log. No torch here."""

import sys

import tqdm as bars

LOG_SECONDS = 30  # between two lines of a log


class tqdm(bars.tqdm):
    """tqdm with fewer updates in a log file, where each of its ten updates per second would be a line."""

    def __init__(self, *arguments, **settings):
        file = settings.get("file") or sys.stderr
        if file is not None and not file.isatty() and "ipykernel" not in sys.modules:
            settings = {"mininterval": LOG_SECONDS, "maxinterval": LOG_SECONDS} | settings
        super().__init__(*arguments, **settings)
