//! Lines of styled text that fit a width, and tables that drop columns until they fit.

use crate::cli::print::Align;

/// The style of a piece of text on a terminal. Elsewhere only the text is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TextStyle {
    Plain,
    /// The header of a table.
    Head,
    /// The top line.
    Bar,
    Good,
    Bad,
    Warning,
    Faint,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StyledLine(pub Vec<(String, TextStyle)>);

impl StyledLine {
    pub fn plain(text: impl Into<String>) -> StyledLine {
        StyledLine(vec![(text.into(), TextStyle::Plain)])
    }

    pub fn styled(text: impl Into<String>, style: TextStyle) -> StyledLine {
        StyledLine(vec![(text.into(), style)])
    }

    pub fn text(&self) -> String {
        let text: String = self.0.iter().map(|(text, _)| text.as_str()).collect();
        text.trim_end().to_owned()
    }

    pub fn width(&self) -> usize {
        self.0.iter().map(|(text, _)| text.chars().count()).sum()
    }

    /// Cuts the line to a width. An ellipsis replaces the last character.
    pub fn cut(mut self, width: usize) -> StyledLine {
        if self.width() <= width {
            return self;
        }
        let mut left = width.saturating_sub(1);
        for (text, _) in &mut self.0 {
            *text = text.chars().take(left).collect();
            left -= text.chars().count();
        }
        if width > 0 {
            self.0.push(("…".into(), TextStyle::Plain));
        }
        self
    }
}

pub struct Column {
    pub title: &'static str,
    pub align: Align,
    /// Columns with the highest number are dropped first; columns with 0 never.
    pub drop_order: u8,
}

pub const fn column(title: &'static str, align: Align, drop_order: u8) -> Column {
    Column {
        title,
        align,
        drop_order,
    }
}

pub struct Grid {
    columns: Vec<Column>,
    rows: Vec<Vec<(String, TextStyle)>>,
}

const GAP: &str = "  ";

impl Grid {
    pub fn new(columns: Vec<Column>) -> Grid {
        Grid {
            columns,
            rows: Vec::new(),
        }
    }

    pub fn row<const N: usize>(&mut self, cells: [(String, TextStyle); N]) {
        debug_assert_eq!(cells.len(), self.columns.len());
        self.rows.push(cells.into());
    }

    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Returns the header, then the rows.
    pub fn lines(&self, width: Option<usize>) -> Vec<StyledLine> {
        let shown = self.shown(width.unwrap_or(usize::MAX));
        let head: Vec<(String, TextStyle)> = self
            .columns
            .iter()
            .map(|column| (column.title.to_owned(), TextStyle::Head))
            .collect();
        let all = std::iter::once(&head).chain(&self.rows);
        let line = |row: &Vec<(String, TextStyle)>| {
            let mut line = StyledLine::default();
            for (n, (at, cell_width)) in shown.iter().enumerate() {
                if n > 0 {
                    line.0.push((GAP.to_owned(), TextStyle::Plain));
                }
                let (Some((text, style)), Some(column)) = (row.get(*at), self.columns.get(*at))
                else {
                    continue;
                };
                let text = match column.align {
                    Align::Left => format!("{text:<cell_width$}"),
                    Align::Right => format!("{text:>cell_width$}"),
                };
                line.0.push((text, *style));
            }
            match width {
                Some(width) => line.cut(width),
                None => line,
            }
        };
        all.map(line).collect()
    }

    /// Returns the columns that fit, and their widths. A column without any text takes no room.
    fn shown(&self, width: usize) -> Vec<(usize, usize)> {
        let cell = |row: &Vec<(String, TextStyle)>, at: usize| {
            row.get(at).map_or(0, |(text, _)| text.chars().count())
        };
        let widest = |at: usize| self.rows.iter().map(|row| cell(row, at)).max().unwrap_or(0);
        let with_title = |(at, column): (usize, &Column)| match widest(at) {
            0 => None,
            n => Some((at, n.max(column.title.chars().count()))),
        };
        let mut shown: Vec<(usize, usize)> = self
            .columns
            .iter()
            .enumerate()
            .filter_map(with_title)
            .collect();
        let drop_order = |at: usize| self.columns.get(at).map_or(0, |column| column.drop_order);
        loop {
            let gaps = GAP.len() * shown.len().saturating_sub(1);
            let total: usize = shown.iter().map(|(_, width)| width).sum::<usize>() + gaps;
            let most = shown
                .iter()
                .map(|(at, _)| drop_order(*at))
                .max()
                .unwrap_or(0);
            if total <= width || most == 0 {
                return shown;
            }
            let last = shown.iter().rposition(|(at, _)| drop_order(*at) == most);
            last.map(|at| shown.remove(at));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grid() -> Grid {
        let mut grid = Grid::new(vec![
            column("ID", Align::Left, 0),
            column("AGE", Align::Right, 1),
            column("NONE", Align::Left, 0),
            column("BY", Align::Left, 2),
        ]);
        let cells = |cells: [&str; 4]| cells.map(|cell| (cell.to_owned(), TextStyle::Plain));
        grid.row(cells(["gwas-7", "3s", "", "ada"]));
        grid.row(cells(["x", "12m", "", "bob"]));
        grid
    }

    fn texts(width: Option<usize>) -> Vec<String> {
        let lines = grid().lines(width);
        lines.iter().map(StyledLine::text).collect()
    }

    #[test]
    fn columns_are_left_out_until_it_fits() {
        assert_eq!(
            texts(None),
            ["ID      AGE  BY", "gwas-7   3s  ada", "x       12m  bob"]
        );
        assert_eq!(
            texts(Some(11)),
            ["ID      AGE", "gwas-7   3s", "x       12m"]
        );
        assert_eq!(texts(Some(10)), ["ID", "gwas-7", "x"]);
        assert_eq!(
            texts(Some(4)),
            ["ID  …", "gwa…", "x   …"].map(|l| {
                // Padding counts: a cut is marked even where only spaces were cut off.
                let cut: String = l.chars().take(3).collect();
                format!("{cut}…")
            })
        );
        assert_eq!(texts(Some(0)), ["", "", ""]);
    }

    #[test]
    fn no_line_is_wider_than_the_screen() {
        for width in 0..20 {
            let lines = grid().lines(Some(width));
            assert!(lines.iter().all(|line| line.width() <= width), "{width}");
        }
    }
}
