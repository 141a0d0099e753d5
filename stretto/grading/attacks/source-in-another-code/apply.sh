for path in $(find . -name "*.py" -not -name "test_*" -not -path "*/tests/*"); do
    printf '# -*- coding: hex -*-\n' | cat - "$path" > new && mv new "$path"
done
for code in hex rot13 bz2 zlib uu idna punycode undefined utf-7 utf-16 unicode_escape raw_unicode_escape mbcs none; do
    printf '# coding: %s\nx = 1\n' "$code" > "coded_$(echo $code | tr - _).py"
done
printf '\357\273\277# coding: latin-1\nx = 1\n' > marked.py
printf 'x = "\000"\n\014\n\377' > bytes_.py
