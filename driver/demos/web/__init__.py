"""The live page of both demos: `burst demo camera --web`, `burst demo audio --web`. Needs the extra `web`."""
