#!/bin/sh
# Runs a command in a build stage and gathers the files that it made or changed under /layer: `COPY --from=STAGE /layer/ /` brings
# those into the image, and nothing of how they came about: no mirror, certificate, cache or package list.
# With --more, they come to those that are there: a stage may have several steps. With --count, files that stay out are counted.
# POSIX sh, find and cp alone: a minimal Debian or Ubuntu has no more. Files that the command removes stay in the image.
set -eu
more='' count=''
while :; do
    case ${1-} in
        --more) more=yes ;;
        --count) count=yes ;;
        *) break ;;
    esac
    shift
done
[ $# -gt 0 ] || { echo 'usage: layer.sh [--more] [--count] COMMAND...' >&2; exit 2; }

[ "$more" ] || rm -rf /layer # of the stage that this one starts from
mkdir -p /layer
: >/layer/.begun
sleep 1 # file systems may count in whole seconds
"$@"

# Logs, package lists and caches differ from build to build.
set -- -path /layer
for folder in /tmp /root/.cache/pip /var/log /var/cache /var/lib/apt /usr/share/man /usr/share/locale /usr/share/info; do
    set -- "$@" -o -path "$folder"
    if [ ! "$count" ] || [ ! -d "$folder" ]; then continue; fi
    files=$(find "$folder" -xdev -cnewer /layer/.begun ! -type d -print0 | tr -cd '\0' | wc -c)
    [ "$files" -eq 0 ] || echo "image.run: files made or changed below $folder, which stay out of the image: $files"
done
# -cnewer: packages keep the times of their files, the file system's own time of change is now.
# The daemon itself mounts the three files in /etc.
# Of a package's documentation its licence stays, as a file or as a link to that of another package.
find / -xdev \
    \( "$@" -o -path /site -o -path /proc -o -path /sys -o -path /dev -o -path '/var/lib/dpkg/*-old' -o -path /var/lib/dpkg/lock \
    -o -path /etc/hosts -o -path /etc/hostname -o -path /etc/resolv.conf \
    -o -path '/usr/share/doc/*' -type f ! -name copyright \) -prune \
    -o -cnewer /layer/.begun \( ! -type d -o -empty \) -print0 |
    xargs -0 -r cp --archive --link --remove-destination --parents --target-directory=/layer
rm /layer/.begun
