"""``python -m ajaxckpt``: the command line."""

from ajaxckpt._cli import main

raise SystemExit(main())
