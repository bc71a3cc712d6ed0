//! JSON with comments and commas after the last entry. DeepSpeed reads its configs as Hjson, of which only this
//! part is supported.

/// The text with blanks in place of its comments (`#` and `//` up to the end of the line, and `/* */`) and of commas
/// before a closing bracket. Every other byte keeps its offset.
pub fn without_comments(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut plain = bytes.to_vec();
    let (mut at, mut quoted) = (0, false);
    // The last byte that is neither blank nor in a comment, and the comma that it is.
    let (mut last, mut comma) = (b'[', None);
    while at < bytes.len() {
        let rest = &bytes[at..];
        let comment = match rest {
            [b'/', b'*', ..] if !quoted => {
                let end = rest.windows(2).skip(2).position(|pair| pair == b"*/");
                end.map_or(rest.len(), |end| end + 4)
            }
            [b'#', ..] | [b'/', b'/', ..] if !quoted => {
                let end = rest.iter().position(|byte| b"\r\n".contains(byte));
                end.unwrap_or(rest.len())
            }
            _ => 0,
        };
        if comment > 0 {
            for byte in &mut plain[at..at + comment] {
                if !b"\r\n".contains(byte) {
                    *byte = b' ';
                }
            }
            at += comment;
            continue;
        }
        match rest[0] {
            b'\\' if quoted => at += 1,
            b'"' => quoted = !quoted,
            b'}' | b']' if !quoted => {
                if let Some(comma) = comma {
                    plain[comma] = b' ';
                }
            }
            _ => {}
        }
        if !rest[0].is_ascii_whitespace() {
            let separates = rest[0] == b',' && !quoted && !b"[{,".contains(&last);
            comma = separates.then_some(at);
            last = rest[0];
        }
        at += 1;
    }
    String::from_utf8_lossy(&plain).into_owned()
}

/// The error with which JSON parsing fails, if any.
pub fn problem(text: &str) -> Option<serde_json::Error> {
    serde_json::from_str::<serde::de::IgnoredAny>(text).err()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_last_commas_become_blanks() {
        for (text, plain) in [
            ("{\"a\": 1} // x", "{\"a\": 1}     "),
            ("{\"a\": 1 # x\n}", "{\"a\": 1    \n}"),
            ("/* é\n */{}", "     \n   {}"),
            ("/*/ 1 */ 2", "         2"),
            ("{} /* x", "{}     "),
            ("{\"a\": \"# // /* \\\" #\"}", "{\"a\": \"# // /* \\\" #\"}"),
            ("{\"a\": 1 / 2}", "{\"a\": 1 / 2}"),
            ("[1, /* 2, */]", "[1          ]"),
            ("{\"a\": [1,\n],}", "{\"a\": [1 \n] }"),
            ("[,]", "[,]"),
            ("[1,,]", "[1,,]"),
            ("[\",\"]", "[\",\"]"),
        ] {
            assert_eq!(without_comments(text), plain, "{text}");
        }
    }
}
