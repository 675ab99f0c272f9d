#!/bin/sh
# Runs a command in a build stage and gathers the files that it made or changed under /layer: `COPY --from=STAGE /layer/ /` brings
# those into the image, and nothing of how they came about: no mirror, certificate, cache or package list.
# With --more, they come to those that are there: a stage may have several steps.
# POSIX sh, find and cp alone: a minimal Debian or Ubuntu has no more. Files that the command removes stay in the image.
set -eu
case ${1-} in
    --more) shift ;;
    *) rm -rf /layer ;; # of the stage that this one starts from
esac
[ $# -gt 0 ] || { echo 'usage: layer.sh [--more] COMMAND...' >&2; exit 2; }

mkdir -p /layer
: >/layer/.begun
sleep 1 # file systems may count in whole seconds
"$@"

# -cnewer: packages keep the times of their files, the file system's own time of change is now.
# Logs, package lists and caches differ from build to build; the daemon itself mounts the three files in /etc.
# Of a package's documentation its licence stays, as a file or as a link to that of another package.
find / -xdev \
    \( -path /layer -o -path /site -o -path /proc -o -path /sys -o -path /dev -o -path /tmp -o -path /root/.cache -o -path /var/log \
    -o -path /var/cache -o -path /var/lib/apt -o -path '/var/lib/dpkg/*-old' -o -path /var/lib/dpkg/lock \
    -o -path /etc/hosts -o -path /etc/hostname -o -path /etc/resolv.conf \
    -o -path '/usr/share/doc/*' -type f ! -name copyright -o -path /usr/share/man -o -path /usr/share/locale -o -path /usr/share/info \) -prune \
    -o -cnewer /layer/.begun \( ! -type d -o -empty \) -print0 |
    xargs -0 -r cp --archive --link --remove-destination --parents --target-directory=/layer
rm /layer/.begun
