# shellcheck shell=sh
# A login shell (enroot starts one) sets PATH anew, without the image's.
PATH=/opt/clipship/bin:$PATH
