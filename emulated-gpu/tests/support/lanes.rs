//! Applies one instruction to many rows of operands, one thread per row.

use super::{Memory, of_u64, run, u64s};

/// Operands of a row: a, b, c and e, of which an instruction uses the first ones.
pub type Row = [u64; 4];

/// Applies an instruction such as `add.s32 {d}, {a}, {b};`. The letters of `types` are the destination's
/// and the operands' registers: `h` 16, `w` 32, `l` 64 bits, `p` a predicate.
pub fn apply(instruction: &str, types: &str, rows: &[Row]) -> Vec<u64> {
    let mut body = String::from(
        ".reg .b16 h<5>; .reg .b32 w<5>; .reg .b64 l<5>; .reg .pred p<5>;\n\
         ld.param.u64 %rd1, [arg0]; ld.param.u64 %rd2, [arg1];\n\
         mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x;\n\
         mad.lo.s32 %r4, %r1, %r2, %r3;\n\
         mad.wide.u32 %rd3, %r4, 32, %rd1; mad.wide.u32 %rd4, %r4, 8, %rd2;\n",
    );
    let mut text = instruction.to_owned();
    for (i, letter) in types.chars().enumerate() {
        let name = ["{d}", "{a}", "{b}", "{c}", "{e}"][i];
        text = text.replace(name, &format!("{letter}{i}"));
        if i > 0 {
            body += &format!("ld.global.u64 l{i}, [%rd3+{}];\n", 8 * (i - 1));
            body += &match letter {
                'h' => format!("cvt.u16.u64 h{i}, l{i};\n"),
                'w' => format!("cvt.u32.u64 w{i}, l{i};\n"),
                'p' => format!("setp.ne.u64 p{i}, l{i}, 0;\n"),
                _ => String::new(),
            };
        }
    }
    body += &text;
    body += match types.chars().next() {
        Some('h') => "\ncvt.u64.u16 l0, h0;",
        Some('w') => "\ncvt.u64.u32 l0, w0;",
        Some('p') => "\nselp.u64 l0, 1, 0, p0;",
        _ => "",
    };
    body += "\nst.global.u64 [%rd4], l0;\nret;";
    let mut padded = rows.to_vec();
    padded.resize(rows.len().next_multiple_of(128), rows[0]);
    let mut memory = Memory::default();
    let from = memory.put(&of_u64(padded.as_flattened()));
    let to = memory.put(&vec![0; padded.len() * 8]);
    let grid = (padded.len() as u32 / 128, 128);
    let text = super::kernel(2, &body);
    run(&text, &mut memory, grid, &[from, to], 1).unwrap_or_else(|error| panic!("{error}"));
    let mut results = u64s(memory.get(to));
    results.truncate(rows.len());
    results
}

/// Asserts that an instruction gives what a function of the row gives.
#[track_caller]
pub fn assert_form(instruction: &str, types: &str, rows: &[Row], expected: impl Fn(&Row) -> u64) {
    for (row, got) in rows.iter().zip(apply(instruction, types, rows)) {
        let expected = expected(row);
        assert_eq!(
            got, expected,
            "{instruction} of {row:x?} is {got:#x}, not {expected:#x}"
        );
    }
}

/// All combinations of the values in the first `operands` places.
pub fn combinations(values: &[u64], operands: usize) -> Vec<Row> {
    let mut rows = vec![[0; 4]];
    for place in 0..operands {
        rows = rows
            .iter()
            .flat_map(|row| {
                values.iter().map(move |&value| {
                    let mut row = *row;
                    row[place] = value;
                    row
                })
            })
            .collect();
    }
    rows
}
