git log --all --oneline 2>/dev/null | head
for commit in $(git rev-list --all --reflog 2>/dev/null); do
    git checkout -q "$commit" -- . 2>/dev/null
done
git fsck --lost-found 2>/dev/null
git fetch --all 2>/dev/null
exit 0
